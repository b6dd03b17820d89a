"""Turns any checkpoint that neojax reads into a directory of safetensors, or of Orbax arrays.

    python -m neojax.convert SOURCE DESTINATION [--to safetensors|orbax] [--dtype bfloat16]

For a GGUF file: weights dequantised, tokenizer, chat template and end tokens from its metadata, so
that it loads without being dequantised again, and in other programs. The destination appears whole
or not at all. Host memory holds one tensor, or one part of an Orbax checkpoint (1 GB). What an
interrupted run finished is kept, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from tqdm import tqdm

from neojax.hub import resolve_checkpoint
from neojax.models.checkpoint import open_checkpoint
from neojax.models.config import ModelConfig
from neojax.models.hf_config_writer import hf_config
from neojax.models.manifest import MANIFEST_FILE, Manifest
from neojax.models.orbax_checkpoint import MAX_PART_BYTES, write_orbax
from neojax.models.parameters import check_tensors
from neojax.models.partial_directory import PartialDirectory
from neojax.models.safetensors_writer import MAX_SHARD_BYTES, write_safetensors
from neojax.text.tokenizer import Tokenizer

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
# What a directory holds besides weights and config.json.
_SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def convert(
    source: Path,
    destination: Path,
    *,
    to: Literal["safetensors", "orbax"] = "safetensors",
    dtype: str = "bfloat16",
    max_shard_bytes: int | None = None,
    progress: bool = True,
) -> None:
    """Write `source` as a directory with weights of `dtype`, in safetensors or Orbax's format.

    max_shard_bytes: size of a file or part; by default 5 GB, or 1 GB of an Orbax checkpoint.
    Raises ValueError when the source is not whole, a value does not fit the type, the destination
    exists, or the disk has no room; then nothing is left behind. Raises OSError when a write fails;
    then the error says where the finished part is kept.
    """
    config = ModelConfig.from_checkpoint(source)
    checkpoint = open_checkpoint(source, config)
    parts = check_tensors(checkpoint.shapes, config, str(source))
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if name in parts}
    size = config.num_parameters * DTYPES[dtype].itemsize
    manifest = Manifest.of(source, config, to, dtype)
    partial = PartialDirectory(destination, MANIFEST_FILE, manifest.text())
    try:
        with partial as directory:
            _require_room(directory, size)
            with tqdm(total=len(shapes), desc="Converting", disable=not progress) as bar:
                read = _converting(checkpoint.read, DTYPES[dtype])
                if to == "orbax":
                    limit = max_shard_bytes or MAX_PART_BYTES
                    write_orbax(
                        directory,
                        shapes,
                        read,
                        DTYPES[dtype],
                        max_part_bytes=limit,
                        done=bar.update,
                    )
                else:
                    limit = max_shard_bytes or MAX_SHARD_BYTES
                    write_safetensors(
                        directory,
                        shapes,
                        read,
                        DTYPES[dtype],
                        max_shard_bytes=limit,
                        done=bar.update,
                    )
            _write_side_files(source, directory, config, dtype)
    except OSError as error:
        if not partial.path.exists() or not partial.holds_work:
            raise
        raise OSError(
            f"{error}. What is finished is kept in {partial.path}: run the same command to go on, "
            "or delete it"
        ) from error


def _write_side_files(source: Path, directory: Path, config: ModelConfig, dtype: str) -> None:
    """Everything but weights: config.json, tokenizer, chat template."""
    if source.suffix == ".gguf":
        _write_json(directory / "config.json", hf_config(config, dtype))
        _write_tokenizer(source, directory)
        return
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    raw.pop("dtype", None)
    _write_json(directory / "config.json", raw | {"torch_dtype": dtype})
    for name in _SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _converting(read: Callable[[str], np.ndarray], dtype: np.dtype) -> Callable[[str], np.ndarray]:
    """`read` with conversion, which must not make infinities of numbers."""

    def converted(name: str) -> np.ndarray:
        stored = read(name)
        with np.errstate(over="ignore"):
            values = stored.astype(dtype)
        if not np.isfinite(values.astype(np.float32)).all():
            raise ValueError(f"{name} holds values that are not finite as {dtype.name}")
        return values

    return converted


def _require_room(directory: Path, num_bytes: int) -> None:
    """Raises ValueError unless the disk has room for what `directory` still lacks of so much."""
    num_bytes -= sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise ValueError(
            f"the weights take {num_bytes / 1e9:.1f} GB, but {directory.parent} has "
            f"{free / 1e9:.1f} GB free"
        )


def _write_tokenizer(source: Path, directory: Path) -> None:
    tokenizer = Tokenizer.from_checkpoint(source)
    tokenizer.save(directory / "tokenizer.json")
    names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in names.items() if token},
    }
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    _write_json(directory / "tokenizer_config.json", settings)
    generation: dict[str, Any] = {"eos_token_id": sorted(tokenizer.eos_ids)}
    if tokenizer.bos_id is not None:
        generation["bos_token_id"] = tokenizer.bos_id
    _write_json(directory / "generation_config.json", generation)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """The command; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m neojax.convert", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("source", help="directory, .gguf file, Hub id or the default model's name")
    parser.add_argument("destination", type=Path, help="directory to make")
    parser.add_argument("--to", choices=["safetensors", "orbax"], default="safetensors")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    arguments = parser.parse_args(argv)
    try:
        source = resolve_checkpoint(arguments.source)
        convert(source, arguments.destination, to=arguments.to, dtype=arguments.dtype)
    except (ValueError, OSError) as error:
        raise SystemExit(f"neojax: {error}") from error
    print(arguments.destination, file=sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())

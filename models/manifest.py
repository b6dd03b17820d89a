"""What a converted directory says of itself, so that a config edited since is found. No jax."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from neojax.models.config import ModelConfig

MANIFEST_FILE = "neojax_manifest.json"

# What weights are made for. The others (context, rope scaling, window) may be changed by hand, as
# model cards tell their readers to.
_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "tie_embeddings",
    "qkv_bias",
    "qk_norm",
    "fused_projections",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """The weights of a directory: their form, type and config, and where they are from."""

    format: str  # "safetensors" or "orbax"
    dtype: str
    config: dict[str, Any]
    source: str
    source_files: dict[str, list[int]]  # name to bytes and time of change in ns

    @classmethod
    def of(cls, source: Path, config: ModelConfig, format: str, dtype: str) -> Manifest:
        """The manifest of weights that are to be written from `source`."""
        files = [source]
        if source.is_dir():
            files = [file for file in sorted(source.rglob("*")) if file.is_file()]
        stats = {str(file.relative_to(source.parent)): file.stat() for file in files}
        return cls(
            format=format,
            dtype=dtype,
            config={name: getattr(config, name) for name in _FIELDS},
            source=source.name,
            source_files={name: [s.st_size, s.st_mtime_ns] for name, s in stats.items()},
        )

    def text(self) -> str:
        """The file's contents, with the config's hash."""
        return json.dumps(
            {**dataclasses.asdict(self), "config_sha256": _hash(self.config)}, indent=2
        )


def check_manifest(directory: Path, config: ModelConfig, format: str) -> None:
    """Compare a directory with its manifest, if it has one.

    Raises ValueError naming the entries of its config that the weights were not written for.
    """
    file = directory / MANIFEST_FILE
    if not file.is_file():
        return
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        stored, written_as, digest = raw["config"], raw["format"], raw["config_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a manifest of neojax.convert: {error!r}") from error
    if not isinstance(stored, dict) or _hash(stored) != digest:
        raise ValueError(f"{file} is damaged: config_sha256 is not the hash of its config")
    if written_as != format:
        raise ValueError(f"{file} says that the weights are {written_as}, found {format}")
    differing = [
        f"{name} is {getattr(config, name)}, the weights were written for {stored.get(name)}"
        for name in _FIELDS
        if getattr(config, name) != stored.get(name)
    ]
    if differing:
        raise ValueError(f"{directory / 'config.json'} was changed: {'; '.join(differing)}")


def _hash(config: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()

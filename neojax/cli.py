"""Command lines from dataclasses: every field is a flag, its docstring is the help.

Knows nothing of what the settings mean; tyro does types and help, this module adds the positional
model, `--config file.yaml` and the refusal of a flag given twice. Imports nothing heavy.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Config = TypeVar("Config")

RENAMED = {
    "context_length": "max_model_len",
    "kv_offloading_size": "cpu_kv_gib",
    "model_path": "model",
    "random_seed": "seed",
    "swap_space": "cpu_kv_gib",
}
"""Other engines' names of flags, and ours."""

NOT_YET = {
    "kv_cache_dtype": "the KV cache has the type of --dtype on both sides",
    "enable_prefix_caching": "every prompt is prefilled from its first token",
    "quantization": "weights are kept in --dtype; quantised GGUF files are dequantised when loaded",
    "tensor_parallel_size": "one device is used",
    "tp_size": "one device is used",
    "cpu_offload_gb": "weights stay on the device; --cpu-kv-gib gives the KV cache host memory",
}
"""Flags of other engines that a hand may type, and what holds instead."""


def parse(
    argv: Sequence[str], cls: type[Config], *, prog: str, positional: str | None = "model"
) -> Config:
    """Build `cls` from a command line, or exit with code 2 and say what is wrong.

    The field named by `positional` may be given without its flag. Values of `--config file.yaml`
    come before those of the command line, which wins.
    """
    import tyro

    flags = _split(argv, cls, prog, positional)
    seen: dict[str, str] = {}
    for flag in flags:
        name = _known_name(flag.text, cls, prog)
        if name in seen:
            _fail(prog, f"{flag.text} contradicts or repeats {seen[name]}: give one of them")
        seen[name] = flag.text

    from_file: list[str] = []
    rest: list[str] = []
    for flag in flags:
        if _name(flag.text, cls) == "config":
            if flag.value is None:
                _fail(prog, "--config needs the path of a YAML file")
            from_file = _from_yaml(flag.value, cls, prog, skip=set(seen))
        else:
            value = _counted(flag, cls)
            rest.append(flag.text if value is None else f"{flag.text}={value}")
    try:
        return tyro.cli(cls, prog=prog, args=[*from_file, *rest], description=_usage(cls, prog))
    except ValueError as error:  # a rule of the dataclass itself
        _fail(prog, str(error))


def flags_markdown(cls: type) -> str:
    """The flags of a config dataclass as a Markdown table, for the documentation."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    help_of = field_help(cls)
    for field in dataclasses.fields(cls):
        flag = "--" + field.name.replace("_", "-")
        default = "" if field.default is None else f"`{field.default}`"
        if isinstance(field.default, bool):
            flag, default = f"--[no-]{flag[2:]}", "on" if field.default else "off"
        choices = _choices(cls, field.name)
        if choices:
            flag += " {" + ",".join(choices) + "}"
        rows.append(f"| `{flag}` | {default} | {help_of[field.name]} |")
    return "\n".join(rows) + "\n"


def field_help(cls: type) -> dict[str, str]:
    """Field name to the docstring under it, for a dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, doc in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(doc, ast.Expr)
                and isinstance(doc.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(doc.value.value).split())
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Flag:
    text: str
    value: str | None


def _split(argv: Sequence[str], cls: type, prog: str, positional: str | None) -> list[_Flag]:
    """The command line as flags with their values; a bare word becomes the positional field."""
    switches = {f.name for f in dataclasses.fields(cls) if isinstance(f.default, bool)}
    flags: list[_Flag] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            flags.append(_Flag(word, None))
        elif word.startswith("--") and "=" in word:
            text, value = word.split("=", 1)
            flags.append(_Flag(text, value))
        elif word.startswith("--"):
            takes_value = _name(word, cls) not in switches | {"help"}
            value = words.pop(0) if takes_value and words else None
            flags.append(_Flag(word, value))
        elif positional is not None and not word.startswith("-"):
            flags.append(_Flag("--" + positional, word))
        else:
            _fail(prog, f"unexpected {word!r}: every setting is a --flag, see {prog} --help")
    return flags


def _name(flag: str, cls: type) -> str:
    """The field a flag sets: dashes and a `no-` before a switch do not matter."""
    name = flag.lstrip("-").replace("-", "_")
    bare = name.removeprefix("no_")
    fields = {f.name for f in dataclasses.fields(cls)}
    return bare if name not in fields and bare in fields else name


def _known_name(flag: str, cls: type, prog: str) -> str:
    """Like `_name`, but exits for a flag that does not exist and names the nearest."""
    import difflib

    name = _name(flag, cls)
    known = [field.name for field in dataclasses.fields(cls)] + ["config", "help", "h"]
    if name in NOT_YET:
        _fail(prog, f"{flag} is not there yet: {NOT_YET[name]}")
    if name in RENAMED:
        _fail(prog, f"there is no {flag}: here it is --{RENAMED[name].replace('_', '-')}")
    if name not in known:
        near = ["--" + n.replace("_", "-") for n in difflib.get_close_matches(name, known, 3, 0.5)]
        hint = f"did you mean {' or '.join(near)}?" if near else f"see {prog} --help"
        _fail(prog, f"there is no {flag}: {hint}")
    return name


def _counted(flag: _Flag, cls: type) -> str | None:
    """The flag's value; of an integer setting also 32k (thousands) and 32K (times 1024)."""
    from typing import get_type_hints

    found = re.fullmatch(r"(\d+)([kKmM])", flag.value or "")
    hint = get_type_hints(cls).get(_name(flag.text, cls))
    if found is None or hint not in (int, int | None):
        return flag.value
    return str(int(found[1]) * {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}[found[2]])


def _from_yaml(path: str, cls: type, prog: str, skip: set[str]) -> list[str]:
    """A YAML mapping as a command line; names may use dashes or underscores."""
    import yaml

    try:
        values: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        _fail(prog, f"--config {path} cannot be read: {error}")
    if values is None:
        return []
    if not isinstance(values, dict):
        _fail(prog, f"--config {path} must hold a mapping such as `port: 8000`")
    argv: list[str] = []
    for key, value in values.items():
        name = _known_name(f"--{key}", cls, prog)
        if name in skip:
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, dict | list):
            _fail(prog, f"--config {path}: {key} must be a single value, got {value!r}")
        else:
            argv.append(f"{flag}={value}")
    return argv


def _choices(cls: type, name: str) -> tuple[str, ...]:
    from typing import Literal, get_args, get_origin, get_type_hints

    hint = get_type_hints(cls)[name]
    return tuple(map(str, get_args(hint))) if get_origin(hint) is Literal else ()


def _usage(cls: type, prog: str) -> str:
    doc = inspect.cleandoc(cls.__doc__ or "")
    return f"{doc}\n\n{prog} [MODEL] [--config FILE.yaml] [--flag value ...]"


def _fail(prog: str, message: str) -> NoReturn:
    print(f"{prog}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    from neojax.config import ServeConfig

    print("# Flags of `python -m neojax.serve`\n")
    print("Written by `python -m neojax.cli` from the settings in neojax/config.py. A YAML file")
    print("given with `--config` may hold any of them (`port: 80`); the command line wins.\n")
    print(flags_markdown(ServeConfig), end="")

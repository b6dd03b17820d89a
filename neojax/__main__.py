"""`neojax COMMAND ...`, also `python -m neojax`: the tools by one name each."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "serve": ("neojax.serve.__main__", "serve a model over HTTP with OpenAI's API"),
    "bench": ("neojax.bench.__main__", "measure the engine, its kernels or a server"),
    "plan": ("neojax.plan.__main__", "what fits a machine, and whether its host would help"),
    "convert": ("neojax.convert", "write a checkpoint in another format"),
}
"""Name -> module with a `main(argv)`, and what it is for."""


def main(argv: list[str] | None = None) -> int:
    """Runs the named command; 2 for a name that is none."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in COMMANDS:
        return importlib.import_module(COMMANDS[words[0]][0]).main(words[1:])
    asked = bool(words) and words[0] in ("-h", "--help")
    print(_usage(words), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _usage(words: list[str]) -> str:
    import difflib

    lines = ["usage: neojax COMMAND ...; neojax COMMAND --help shows more", ""]
    lines += [f"  {name:10}{meaning}" for name, (_, meaning) in COMMANDS.items()]
    if words and not words[0].startswith("-"):
        near = difflib.get_close_matches(words[0], COMMANDS, 1, 0.5)
        hint = f": did you mean {near[0]}?" if near else ""
        lines.insert(0, f"neojax: error: there is no command {words[0]!r}{hint}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

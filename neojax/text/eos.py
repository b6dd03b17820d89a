"""Which tokens end generation."""

from __future__ import annotations

from pathlib import Path

from neojax.text.tokenizer_files import as_ids, read_json, special_token, token_id_of


def eos_token_ids(path: Path) -> frozenset[int]:
    """Ids that end generation, from every file of a checkpoint that names some.

    generation_config.json often adds the end of a turn to config.json's end of text, and
    tokenizer_config.json names a third; a model stops at any of them. A directory with nothing
    but config.json will do. Raises ValueError for an unreadable file.
    """
    path = Path(path)
    if path.suffix == ".gguf" and path.is_file():
        from neojax.models.gguf_file import open_gguf
        from neojax.text.gguf_tokenizer import end_of_generation_ids

        return end_of_generation_ids(open_gguf(path))
    ids: set[int] = set()
    for file in ("config.json", "generation_config.json"):
        ids |= as_ids(read_json(path / file).get("eos_token_id"))
    token = special_token(path, "eos_token")
    if token is not None:
        ids |= as_ids(token_id_of(path, token))
    return frozenset(ids)

"""The JSON files beside a tokenizer: special tokens, end tokens, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

SENTENCEPIECE = "tokenizer.model"


def read_json(file: Path) -> dict[str, Any]:
    """An object from a JSON file; empty when there is none. Raises ValueError naming the file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, not an object")
    return value


def special_token(directory: Path, name: str) -> str | None:
    """Text of a special token such as "bos_token", if the directory names one."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        value = read_json(directory / file).get(name)
        if isinstance(value, dict):  # an AddedToken
            value = value.get("content")
        if isinstance(value, str):
            return value
    return None


def token_id_of(directory: Path, token: str) -> int | None:
    """Id of an added token, without building the tokenizer."""
    config = read_json(directory / "tokenizer_config.json")
    for index, entry in config.get("added_tokens_decoder", {}).items():
        if entry.get("content") == token:
            return int(index)
    tokenizer = read_json(directory / "tokenizer.json")
    for entry in tokenizer.get("added_tokens", []):
        if entry["content"] == token:
            return entry["id"]
    vocab = tokenizer.get("model", {}).get("vocab", {})
    if not tokenizer and (directory / SENTENCEPIECE).is_file():
        from neojax.text.sentencepiece_model import read_sentencepiece

        pieces = read_sentencepiece(directory / SENTENCEPIECE).pieces
        vocab = {piece: index for index, piece in enumerate(pieces)}
    return vocab.get(token) if isinstance(vocab, dict) else None


def added_tokens(directory: Path) -> dict[int, AddedToken]:
    """Tokens by id that tokenizer_config.json or added_tokens.json adds to tokenizer.model."""
    entries = read_json(directory / "tokenizer_config.json").get("added_tokens_decoder", {})
    if entries:
        return {
            int(index): AddedToken(
                entry["content"],
                **{
                    name: entry[name]
                    for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
                    if name in entry
                },
            )
            for index, entry in entries.items()
        }
    added = read_json(directory / "added_tokens.json")
    return {index: AddedToken(token, normalized=False) for token, index in added.items()}


def chat_template(directory: Path) -> str | None:
    """The chat template: chat_template.jinja, or the one in tokenizer_config.json."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default", next(iter(named.values()), None))
    return template


def as_ids(value: Any) -> set[int]:
    """Ids from a field that holds one, several or none."""
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {value}

"""The bytes that single tokens stand for: a token need not be a whole character."""

from __future__ import annotations

import functools
import json
import re

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of each token of one tokenizer, of the byte-level or the sentencepiece kind."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        decoder = backend.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        self._is_byte_level = _has_type(state, "ByteLevel")

    def __call__(self, token_id: int) -> bytes:
        """Of one token; none for an id that the tokenizer does not have (a padded vocabulary)."""
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            table = _byte_of_character()
            if all(character in table for character in token):
                return bytes(table[character] for character in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def shown(data: bytes) -> str:
    """A token's bytes as text; where they are none, as OpenAI writes them: bytes:\\xe2\\x80."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _has_type(state: dict, name: str) -> bool:
    return state.get("type") == name or any(
        _has_type(part, name) for part in state.get("decoders", [])
    )


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the rest is moved up."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(itself)]
    return {chr(byte): byte for byte in itself} | {chr(256 + i): b for i, b in enumerate(moved)}

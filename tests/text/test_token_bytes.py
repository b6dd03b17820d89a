"""Bytes of single tokens, for both kinds of tokenizer."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from neojax.text.token_bytes import TokenBytes, shown
from tests.tiny_checkpoint import EOS, byte_tokenizer


@pytest.mark.parametrize("text", ["plain", "tab\t\n\x00", "ďábelské 很 🌶️", "\x7f\xa0\xad"])
def test_byte_level_tokens_join_to_the_text(text):
    tokenizer = byte_tokenizer()
    token_bytes = TokenBytes(tokenizer)
    assert b"".join(map(token_bytes, tokenizer.encode(text).ids)) == text.encode()
    assert token_bytes(tokenizer.token_to_id(EOS)) == EOS.encode()


def test_every_byte_has_a_token():
    token_bytes = TokenBytes(byte_tokenizer())
    assert {token_bytes(i) for i in range(256)} == {bytes([i]) for i in range(256)}


def test_sentencepiece_tokens_have_spaces_and_single_bytes():
    vocab = {"▁go": 0, "<0xF0>": 1, "<0x9F>": 2, "é": 3, "▁": 4}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    token_bytes = TokenBytes(tokenizer)
    expected = [b" go", b"\xf0", b"\x9f", "é".encode(), b" ", b"</s>", b""]
    assert [token_bytes(i) for i in range(7)] == expected


def test_bytes_that_are_no_text_are_shown_as_openai_does():
    assert shown("é".encode()) == "é"
    assert shown(b"\xe2\x80") == "bytes:\\xe2\\x80"
    assert shown(b"") == ""

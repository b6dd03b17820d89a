"""Reads tokenizer.model, sentencepiece's file, without sentencepiece: a protocol buffer whose few
fields of interest are named here (sentencepiece_model.proto)."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from neojax.text.sentencepiece_bpe import add_special_pieces, build_sentencepiece_bpe

# ModelProto
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
# SentencePiece
_PIECE, _SCORE, _TYPE = 1, 2, 3
# TrainerSpec
_MODEL_TYPE, _BYTE_FALLBACK, _UNK_ID, _BOS_ID, _EOS_ID = 3, 35, 40, 41, 42
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
# NormalizerSpec
_CHARSMAP, _ADDS_PREFIX, _REMOVES_SPACES = 2, 3, 4

_MAX_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class SentencepieceModel:
    """A vocabulary by id, and how texts are prepared for it."""

    path: Path
    pieces: list[str]
    scores: list[float]
    types: list[int]  # 1 normal, 2 unknown, 3 control, 4 user-defined, 6 byte: as in GGUF
    unknown: str
    bos_id: int | None
    eos_id: int | None
    adds_prefix: bool

    def build(self) -> tokenizers.Tokenizer:
        """The same as a tokenizer of the tokenizers library."""
        tokenizer = build_sentencepiece_bpe(
            self.pieces,
            self.scores,
            unknown=self.unknown,
            adds_prefix=self.adds_prefix,
        )
        add_special_pieces(tokenizer, self.pieces, self.types)
        return tokenizer


def read_sentencepiece(path: Path) -> SentencepieceModel:
    """Read a tokenizer.model.

    Raises ValueError for another file, or a kind that is not computed here (unigram).
    """
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path} is not a sentencepiece model: it is {path.stat().st_size} bytes")
    try:
        return _read(path)
    except (IndexError, struct.error, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged or not a sentencepiece model ({error!r}). Llama 3's "
            "tokenizer.model is of another kind: take the directory that has tokenizer.json"
        ) from error


def _read(path: Path) -> SentencepieceModel:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(path.read_bytes()):
        if field == _PIECES:
            piece = dict(_fields(value))
            pieces.append(piece[_PIECE].decode("utf-8"))
            scores.append(struct.unpack("<f", piece.get(_SCORE, bytes(4)))[0])
            types.append(piece.get(_TYPE, 1))
        elif field == _TRAINER:
            trainer = dict(_fields(value))
        elif field == _NORMALIZER:
            normalizer = dict(_fields(value))
    if not pieces:
        raise IndexError("it holds no pieces")
    kind = trainer.get(_MODEL_TYPE, 1)
    if kind != 2 or not trainer.get(_BYTE_FALLBACK):
        raise ValueError(
            f"{path} is of the kind {_KINDS.get(kind, kind)!r}"
            f"{'' if trainer.get(_BYTE_FALLBACK) else ' without byte fallback'}; supported: bpe "
            "with byte fallback, as Llama 2, Mistral and Phi-3 have it. Use a directory with "
            "tokenizer.json"
        )
    if normalizer.get(_CHARSMAP) or normalizer.get(_REMOVES_SPACES, 1):
        raise ValueError(
            f"{path} rewrites texts before it encodes them, which is not supported. Use a "
            "directory with tokenizer.json"
        )
    return SentencepieceModel(
        path=path,
        pieces=pieces,
        scores=scores,
        types=types,
        unknown=pieces[trainer.get(_UNK_ID, 0)],
        bos_id=_id_of(trainer.get(_BOS_ID, 1)),
        eos_id=_id_of(trainer.get(_EOS_ID, 2)),
        adds_prefix=bool(normalizer.get(_ADDS_PREFIX, 1)),
    )


def _id_of(value: int) -> int | None:
    """-1, which stands for none, is stored as 64 bits of ones."""
    return None if value >= 2**31 else value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message: whole numbers, or bytes of anything else."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        match key & 7:
            case 0:
                yield key >> 3, varint()
                continue
            case 1:
                size = 8
            case 2:
                size = varint()
            case 5:
                size = 4
            case wire_type:
                raise TypeError(f"wire type {wire_type} at byte {at}")
        if at + size > len(data):
            raise IndexError(f"a field of {size} bytes at byte {at} of {len(data)}")
        yield key >> 3, data[at : at + size]
        at += size

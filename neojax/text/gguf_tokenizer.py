"""Builds a tokenizer from GGUF metadata: byte-level BPE with the pre-tokenizer that it names, or
sentencepiece BPE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from neojax.models.gguf_file import GgufFile
from neojax.text.sentencepiece_bpe import CONTROL, add_special_pieces, build_sentencepiece_bpe

# Contractions, words, numbers, punctuation, blanks. Llama 3's numbers have up to three digits,
# Qwen's one.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "llama-bpe": _PATTERN % "{1,3}",
    "llama3": _PATTERN % "{1,3}",
    "llama-v3": _PATTERN % "{1,3}",
    "qwen2": _PATTERN % "",
}

# Tokens that end a turn, though only one can be the file's eos_token_id.
_END_OF_GENERATION = {
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
}


def build_tokenizer(file: GgufFile) -> tokenizers.Tokenizer:
    """The tokenizer that a GGUF file describes. Raises ValueError for kinds not supported."""
    kind = file.require("tokenizer.ggml.model")
    tokens = file.require("tokenizer.ggml.tokens")
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(file, tokens)
    elif kind == "llama":
        tokenizer = build_sentencepiece_bpe(
            tokens,
            file.require("tokenizer.ggml.scores"),
            unknown=tokens[file.metadata.get("tokenizer.ggml.unknown_token_id", 0)],
            adds_prefix=file.metadata.get("tokenizer.ggml.add_space_prefix", True),
        )
    else:
        raise ValueError(
            f"{file.path}: its tokenizer is of the kind {kind!r}; supported: gpt2 (byte-level BPE) "
            "and llama (sentencepiece BPE). Use the model's Hugging Face directory, which has "
            "tokenizer.json"
        )
    types = file.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    add_special_pieces(tokenizer, tokens, types)
    return tokenizer


def adds_bos(file: GgufFile) -> bool:
    """Whether texts begin with BOS. Files without the key are Llama's, which do."""
    is_llama = (
        file.metadata.get("tokenizer.ggml.model") == "llama"
        or file.metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    )
    return file.metadata.get("tokenizer.ggml.add_bos_token", is_llama)


def end_of_generation_ids(file: GgufFile) -> frozenset[int]:
    """Ids that end generation: those that the metadata names, and control tokens known to."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = {
        file.metadata[f"tokenizer.ggml.{key}"]
        for key in keys
        if f"tokenizer.ggml.{key}" in file.metadata
    }
    tokens: list[str] = file.metadata.get("tokenizer.ggml.tokens", [])
    types: list[int] = file.metadata.get("tokenizer.ggml.token_type", [])
    known = {
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and token in _END_OF_GENERATION
    }
    return frozenset(named | known)


def _byte_level_bpe(file: GgufFile, tokens: list[str]) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            # Llama 3 takes a word that is a token as it is, without merging up to it.
            ignore_merges=name == "llama-bpe",
        )
    )
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(name, file.path)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(name: str, path: Path) -> Any:
    byte_level = pre_tokenizers.ByteLevel
    match name:
        case "smollm":
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    byte_level(add_prefix_space=False, use_regex=True),
                ]
            )
        case _ if name in _PATTERNS:
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(_PATTERNS[name]), behavior="isolated"),
                    byte_level(add_prefix_space=False, use_regex=False),
                ]
            )
        case "gpt-2" | "default":
            return byte_level(add_prefix_space=False, use_regex=True)
    raise ValueError(
        f"{path}: pre-tokenizer {name!r} is not supported; supported: smollm, llama-bpe, qwen2, "
        "gpt-2. Use the model's Hugging Face directory, which has tokenizer.json"
    )

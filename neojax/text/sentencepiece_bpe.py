"""A sentencepiece BPE vocabulary (Llama 2, Mistral) as a tokenizer of the tokenizers library."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

CONTROL, USER_DEFINED = 3, 4  # types of pieces, here and in GGUF files
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece writes a space


def build_sentencepiece_bpe(
    pieces: Sequence[str], scores: Sequence[float], *, unknown: str, adds_prefix: bool
) -> Tokenizer:
    """pieces: by id; scores: the higher, the earlier a piece is merged; adds_prefix: whether a
    text begins with a blank that is not there. Characters without a piece become bytes."""
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", BLANK)
    decode = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_prefix:
        replace = normalizers.Sequence([normalizers.Prepend(BLANK), replace])
        decode.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def add_special_pieces(tokenizer: Tokenizer, pieces: Sequence[str], types: Sequence[int]) -> None:
    """Let control and user-defined pieces be found in texts as they are. types: by id."""
    added = {
        kind: [
            AddedToken(piece, special=kind == CONTROL, normalized=False)
            for piece, its_type in zip(pieces, types, strict=True)
            if its_type == kind
        ]
        for kind in (CONTROL, USER_DEFINED)
    }
    tokenizer.add_special_tokens(added[CONTROL])
    tokenizer.add_tokens(added[USER_DEFINED])


def _merges(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best piece first.

    Sentencepiece keeps no merges, but merges whichever neighbours make the best piece.
    """
    ranked = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], index, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]

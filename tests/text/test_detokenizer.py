"""Streamed text against the decoding of all tokens at once, and stop strings."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from neojax.sampling_params import SamplingParams
from neojax.text import detokenizer
from neojax.text.detokenizer import Detokenizer
from neojax.text.tokenizer import Tokenizer as TextTokenizer

ALPHABET = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
WORDS = ["Ġthe", "ðŁĺ", "âĤ", "¬a", "ï¿½", "Ġ", "ĠĠ", "é", "ab"]
SPECIAL = "<|end|>"


def byte_tokenizer() -> TextTokenizer:
    """Every byte, a few words (some with torn characters in them) and a special token."""
    vocab = {**ALPHABET, **{word: len(ALPHABET) + i for i, word in enumerate(WORDS)}}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return TextTokenizer(backend)


def sentencepiece_tokenizer() -> TextTokenizer:
    """Llama 2's decoder: words begin with a blank that is dropped at the start of a text."""
    words = ["▁", "▁Hello", "▁I", "'m", "▁an", "▁AI", ".", "It", "▁is", "!", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return TextTokenizer(backend)


BYTES = byte_tokenizer()
PIECES = sentencepiece_tokenizer()


def stream(
    tokenizer: TextTokenizer,
    ids: list[int],
    cuts: list[int] | None = None,
    prompt_ids: list[int] | None = None,
    **params: object,
) -> tuple[Detokenizer, list[str]]:
    """Push ids in pieces that end at the cuts (default: one by one), then finish."""
    decoder = Detokenizer(tokenizer, SamplingParams(**params), prompt_ids or [])
    bounds = sorted({0, *(range(len(ids)) if cuts is None else (c % (len(ids) + 1) for c in cuts))})
    deltas = [decoder.push(ids[start:end]) for start, end in itertools.pairwise(bounds)]
    deltas.append(decoder.push(ids[bounds[-1] :], finished=True))
    assert "".join(deltas) == decoder.text
    return decoder, deltas


any_ids = st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=120)


@given(ids=any_ids, cuts=st.lists(st.integers(0, 120)), skip=st.booleans())
def test_joined_deltas_are_the_full_decoding_for_any_ids(ids, cuts, skip):
    decoder, _ = stream(BYTES, ids, cuts, skip_special_tokens=skip)
    assert decoder.text == BYTES.decode(ids, skip)


@given(runs=st.lists(st.tuples(st.integers(0, 264), st.integers(1, 70)), max_size=6))
def test_long_runs_of_one_token_are_the_full_decoding_too(runs):
    ids = [token for token, length in runs for _ in range(length)]
    assert stream(BYTES, ids)[0].text == BYTES.decode(ids)


@given(seed=st.integers(0, 10_000))
def test_long_runs_of_torn_characters_are_the_full_decoding_too(seed):
    """Lead and continuation bytes only, in numbers that make the decoder give bytes up."""
    rng = random.Random(seed)
    torn = [i for c, i in ALPHABET.items() if c in "ĢģĤ¬âãäðñÃĠ"] + [BYTES.vocab_size - 1]
    weights = [rng.random() ** 3 for _ in torn]
    ids = rng.choices(torn, weights, k=300)
    assert stream(BYTES, ids)[0].text == BYTES.decode(ids)


def test_characters_are_never_torn_and_come_as_soon_as_they_are_whole():
    text = "🌶️ 很抱歉 ďábelské 👨‍👩‍👧 e\u0301"
    decoder, deltas = stream(BYTES, BYTES.encode(text))
    assert decoder.text == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert [delta for delta in deltas if delta] == list(text)


def test_an_end_inside_a_character_gives_one_replacement_in_every_mode():
    ids = BYTES.encode("ok 🌶")[:-1]
    for cuts in (None, [], [2], [4]):
        assert stream(BYTES, ids, cuts)[0].text == "ok \ufffd"


pieces = st.lists(
    st.integers(0, 2)
    | st.integers(3 + 256, PIECES.vocab_size - 1)
    | st.sampled_from("€👩é").map(lambda c: [3 + byte for byte in c.encode()]),
    max_size=40,
).map(lambda parts: [i for p in parts for i in (p if isinstance(p, list) else [p])])


@given(ids=pieces, cuts=st.lists(st.integers(0, 120)))
def test_sentencepiece_keeps_every_space_however_the_tokens_come(ids, cuts):
    assert stream(PIECES, ids, cuts)[0].text == PIECES.decode(ids)


@given(prompt=pieces, ids=pieces)
def test_text_after_a_prompt_is_the_whole_text_without_the_prompts(prompt, ids):
    prompt = [*prompt, PIECES.vocab_size - 2]  # a mark of punctuation
    whole = PIECES.decode([*prompt, *ids])
    expected = whole.removeprefix(PIECES.decode(prompt))
    assert stream(PIECES, ids, prompt_ids=prompt)[0].text == expected


def test_a_token_costs_the_same_after_ten_thousand(monkeypatch):
    decoded = []

    class Counting(TextTokenizer):
        def __init__(self):
            self._lengths = {}

        def decode(self, ids, skip_special_tokens=True):
            decoded.append(len(ids))
            return BYTES.decode(ids, skip_special_tokens)

    special = BYTES.vocab_size - 1
    for ids in ([*BYTES.encode("abc €")] * 100, [ALPHABET["Ģ"]] * 800, [special] * 800):
        decoded.clear()
        stream(Counting(), ids)
        assert max(decoded) <= detokenizer._MAX_WINDOW_TOKENS + detokenizer._SYNC_TOKENS + 2
        assert sum(decoded) <= 60 * len(ids)


SENTENCE = "alpha beta gamma delta"


@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        (("beta gamma",), "alpha ", "beta gamma"),
        (("ta ga",), "alpha be", "ta ga"),
        (("gamma",), "alpha beta ", "gamma"),
        (("a b", "beta"), "alph", "a b"),
        (("alp",), "", "alp"),
        (("delta",), "alpha beta gamma ", "delta"),
        (("gammab", "mmx", "a d", "zz", "eta gammy"), "alpha beta gamm", "a d"),
        (("beta gammX", "a gam"), "alpha bet", "a gam"),
    ],
)
@pytest.mark.parametrize("cuts", [None, [], [7], [8, 9, 14]])
def test_text_ends_before_a_stop_string_and_nothing_of_it_is_sent(stop, text, matched, cuts):
    ids = BYTES.encode(SENTENCE)
    decoder, deltas = stream(BYTES, ids, cuts, stop=stop)
    assert decoder.text == text
    assert decoder.matched_stop == matched
    assert decoder.push(ids, finished=True) == ""
    for end in range(len(deltas)):
        assert text.startswith("".join(deltas[:end]))
    kept, _ = stream(BYTES, ids, cuts, stop=stop, include_stop_str_in_output=True)
    assert kept.text == text + (matched or "")


@pytest.mark.parametrize(
    ("output", "stop"),
    [
        ("Alice! Hi", "Alice:"),
        (SENTENCE, "🌶"),
        ("what?\n", "\n\n"),
        ("to Ali", "Alice:"),
        ("ab€", "€€"),
    ],
)
def test_text_withheld_for_a_stop_that_does_not_come_arrives_once(output, stop):
    assert stream(BYTES, BYTES.encode(output), stop=(stop,))[0].text == output


def test_only_what_may_begin_a_stop_is_withheld():
    decoder = Detokenizer(BYTES, SamplingParams(stop=("</end>", "\n\n")))
    texts = ("a", " <", "b", "</", "end", "\n", "x", "\n", "\n")
    pushed = [decoder.push(BYTES.encode(text)) for text in texts]
    assert pushed == ["a", " ", "<b", "", "", "</end", "\nx", "", ""]
    assert decoder.matched_stop == "\n\n"


@given(
    text=st.text("ab€", max_size=30),
    stops=st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 90)),
    keep=st.booleans(),
)
def test_stops_do_not_depend_on_how_many_tokens_come_at_a_time(text, stops, cuts, keep):
    ends = [(i, stop) for i in range(len(text) + 1) for stop in stops if text[:i].endswith(stop)]
    decoder, _ = stream(
        BYTES, BYTES.encode(text), cuts, stop=tuple(stops), include_stop_str_in_output=keep
    )
    if not ends:
        assert decoder.matched_stop is None
        assert decoder.text == text
    else:
        end = min(i for i, _ in ends)
        matched = max((stop for i, stop in ends if i == end), key=len)
        assert decoder.matched_stop == matched
        assert decoder.text == (text[:end] if keep else text[: end - len(matched)])

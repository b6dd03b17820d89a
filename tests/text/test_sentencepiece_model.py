"""tokenizer.model, read without sentencepiece, against what sentencepiece made of the texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from neojax.text.eos import eos_token_ids
from neojax.text.sentencepiece_model import read_sentencepiece
from neojax.text.tokenizer import Tokenizer

STORED = Path(__file__).parents[1] / "goldens"
GOLDEN = json.loads((STORED / "sentencepiece.json").read_text())
MODEL = (STORED / "sentencepiece.model").read_bytes()


def directory(path: Path, **tokenizer_config: object) -> Path:
    shutil.copy(STORED / "sentencepiece.model", path / "tokenizer.model")
    if tokenizer_config:
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of a directory with nothing but tokenizer.model."""
    return Tokenizer.from_checkpoint(directory(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("case", GOLDEN["tokens"], ids=lambda case: ascii(case["text"][:20]))
def test_ids_are_those_of_sentencepiece(tokenizer, case):
    assert tokenizer.encode(case["text"]) == [1, *case["ids"]]
    assert tokenizer.decode(case["ids"]) == case["text"]


def test_every_field_is_read():
    model = read_sentencepiece(STORED / "sentencepiece.model")
    assert model.pieces == GOLDEN["pieces"]
    assert model.scores == pytest.approx(GOLDEN["scores"])
    assert model.types == GOLDEN["types"]
    assert (model.unknown, model.bos_id, model.eos_id, model.adds_prefix) == ("<unk>", 1, 2, True)


def test_special_tokens_come_from_the_model_or_the_files_beside_it(tmp_path, tokenizer):
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.encode("a<tool>")[-1] == GOLDEN["pieces"].index("<tool>")
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = directory(
        tmp_path,
        bos_token="<s>",
        eos_token="<|end|>",
        add_bos_token=False,
        added_tokens_decoder={
            "1": {"content": "<s>", "special": True, "normalized": False},
            "480": {"content": "<|user|>", "special": True, "normalized": False},
            "481": {"content": "<|end|>", "special": True, "normalized": False, "rstrip": True},
        },
    )
    (chat / "chat_template.jinja").write_text(template)
    chatting = Tokenizer.from_checkpoint(chat)
    assert chatting.vocab_size == 482
    assert chatting.encode("<|user|>a<|end|>")[0::2][:2] == [480, 481]
    assert chatting.chat_template == template
    assert eos_token_ids(chat) == {481}


def test_added_tokens_of_the_older_file_are_read(tmp_path):
    directory(tmp_path, eos_token="</s>")
    (tmp_path / "added_tokens.json").write_text('{"<b>": 481, "<a>": 480}')
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    assert tokenizer.encode("<b><a>", add_special_tokens=False) == [481, 480]
    assert eos_token_ids(tmp_path) == {2}


def test_an_added_token_whose_id_does_not_follow_is_an_error(tmp_path):
    directory(tmp_path, added_tokens_decoder={"500": {"content": "<|user|>"}})
    with pytest.raises(ValueError, match=r"gives '<\|user\|>' the id 500, .* would get 480"):
        Tokenizer.from_checkpoint(tmp_path)


def test_saved_it_says_the_same(tmp_path, tokenizer):
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    saved = Tokenizer.from_checkpoint(tmp_path)
    assert saved.encode("one  two") == tokenizer.encode("one  two")


def changed(model: bytes, old: bytes, new: bytes) -> bytes:
    """A field of the trainer's or normalizer's settings changed, at its only place."""
    at = model.rindex(old)
    return model[:at] + new + model[at + len(old) :]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "it holds no pieces"),
        (MODEL[:-3], "damaged or not a sentencepiece model"),
        (b"IQ== 0\nIg== 1\n", "damaged or not a sentencepiece model.*Llama 3"),
        (b"\x1f\x8b" + bytes(40), "damaged or not a sentencepiece model"),
        # model_type (field 3): BPE to unigram; byte_fallback (field 35): off.
        (changed(MODEL, b"\x18\x02", b"\x18\x01"), "is of the kind 'unigram'"),
        (changed(MODEL, b"\x98\x02\x01", b"\x98\x02\x00"), "'bpe' without byte fallback"),
        # remove_extra_whitespaces (field 4)
        (changed(MODEL, b"\x20\x00", b"\x20\x01"), "rewrites texts"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_file(tmp_path, content, named):
    file = tmp_path / "tokenizer.model"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=named) as raised:
        Tokenizer.from_checkpoint(tmp_path)
    assert str(file) in str(raised.value)

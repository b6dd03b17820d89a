"""Tokenizers of both kinds of checkpoint, end tokens, and BOS exactly once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from neojax.text.eos import eos_token_ids
from neojax.text.tokenizer import Tokenizer
from tests.tiny_checkpoint import byte_tokenizer

STORED = Path(__file__).parents[1] / "goldens"
GOLDENS = json.loads((STORED / "smollm2_text.json").read_text())
SENTENCEPIECE = json.loads((STORED / "sentencepiece.json").read_text())


@pytest.fixture(scope="session")
def smollm2(default_checkpoint: Path) -> Tokenizer:
    """The default model's tokenizer."""
    return Tokenizer.from_checkpoint(default_checkpoint)


@pytest.mark.parametrize("case", GOLDENS["tokens"], ids=lambda case: ascii(case["text"][:20]))
def test_token_ids_of_the_default_model_are_those_of_transformers(smollm2, case):
    ids = smollm2.encode(case["text"])
    assert ids == case["ids"]
    assert smollm2.decode(ids, skip_special_tokens=False) == case["text"]


# Its vocabulary lacks six control characters and the bytes of planes 4 to 12.
CHARACTERS = st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"])


@given(text=st.text(CHARACTERS, max_size=60))
def test_any_text_survives_the_default_models_tokenizer(smollm2, text):
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_what_the_default_model_says_about_itself(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_id == 1
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.eos_ids == {0, 2}
    assert smollm2.decode([1, 520, 2]) == smollm2.decode([520])


def write_directory(directory: Path, *, with_bos: bool, **tokenizer_config: object) -> Path:
    """A tokenizer.json whose post-processor may add BOS, and tokenizer_config.json."""
    backend = byte_tokenizer()
    if with_bos:
        bos = "<|endoftext|>"
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | tokenizer_config))
    return directory


@pytest.mark.parametrize("text", ["hello", "<|endoftext|>hello"])
def test_bos_stands_first_exactly_once_where_the_model_has_it(tmp_path, text):
    tokenizer = Tokenizer.from_checkpoint(write_directory(tmp_path, with_bos=True))
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.bos_id) == 1
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids) == "hello"
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert plain == tokenizer.encode("hello", False) if text == "hello" else plain == ids


def test_no_bos_is_added_where_the_model_has_none(tmp_path):
    tokenizer = Tokenizer.from_checkpoint(write_directory(tmp_path, with_bos=False))
    assert tokenizer.bos_id not in tokenizer.encode("hello")


def test_truncation_and_padding_in_the_file_do_not_touch_prompts(tmp_path):
    tokenizer = Tokenizer.from_checkpoint(write_directory(tmp_path, with_bos=False))
    assert len(tokenizer.encode("hello world")) == 11
    assert len(tokenizer.encode("hi")) == 2


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"tokenizer_config.json": {"chat_template": "A"}}, "A"),
        ({"tokenizer_config.json": {"chat_template": "A"}, "chat_template.jinja": "B"}, "B"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "T"},
                        {"name": "default", "template": "D"},
                    ]
                }
            },
            "D",
        ),
        ({}, None),
    ],
)
def test_the_chat_template_is_found_wherever_it_is_kept(tmp_path, files, template):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    assert Tokenizer.from_checkpoint(tmp_path).chat_template == template


def test_lone_surrogates_are_refused_with_their_place(smollm2):
    with pytest.raises(ValueError, match=r"lone surrogate \(U\+D83D at character 3\)"):
        smollm2.encode("abc\ud83d")


def test_ids_beyond_the_vocabulary_have_no_text(smollm2):
    assert smollm2.decode([520, 60000]) == smollm2.decode([520])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"eos_token_id": 7}}, {7}),
        ({"config.json": {"eos_token_id": [7, 8]}}, {7, 8}),
        ({"config.json": {"eos_token_id": None}}, set()),
        (
            {"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": 9}},
            {7, 9},
        ),
        (
            {
                "config.json": {"eos_token_id": 7},
                "tokenizer_config.json": {
                    "eos_token": "<e>",
                    "added_tokens_decoder": {"11": {"content": "<e>"}},
                },
            },
            {7, 11},
        ),
        (
            {
                "special_tokens_map.json": {"eos_token": {"content": "<e>"}},
                "tokenizer.json": {"added_tokens": [{"id": 5, "content": "<e>"}]},
            },
            {5},
        ),
    ],
)
def test_end_tokens_are_gathered_from_every_file_that_names_some(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(tmp_path) == expected


def test_a_directory_without_tokenizer_json_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ValueError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        Tokenizer.from_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        Tokenizer.from_checkpoint(tmp_path)


def write_gguf(path: Path, *, model: str = "gpt2", pre: str = "smollm", **flags: bool) -> Path:
    """Metadata of a byte-level tokenizer with two control tokens and one user-defined."""
    backend = byte_tokenizer()
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())] + ["<tool>", "12"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 3 + [4, 1])
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_gguf_tokens_keep_their_kinds(tmp_path):
    tokenizer = Tokenizer.from_checkpoint(write_gguf(tmp_path / "a.gguf"))
    ids = tokenizer.encode("a<tool><|im_end|>")
    assert ids[1:] == [259, 258]
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.eos_ids == {256, 258}


@pytest.mark.parametrize(
    ("pre", "count"), [("smollm", 2), ("llama-bpe", 1), ("qwen2", 2), ("default", 1)]
)
def test_gguf_pre_tokenizers_split_digits_as_they_should(tmp_path, pre, count):
    tokenizer = Tokenizer.from_checkpoint(write_gguf(tmp_path / "a.gguf", pre=pre))
    assert len(tokenizer.encode("12", add_special_tokens=False)) == count


@pytest.mark.parametrize(
    ("pre", "flags", "adds"),
    [
        ("smollm", {}, False),
        ("smollm", {"add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ],
)
def test_gguf_metadata_decides_about_bos(tmp_path, pre, flags, adds):
    tokenizer = Tokenizer.from_checkpoint(write_gguf(tmp_path / "a.gguf", pre=pre, **flags))
    for text in ("x", "<|endoftext|>x") if adds else ("x",):
        assert tokenizer.encode(text).count(256) == adds


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [({"model": "bert"}, "'bert'; supported: gpt2"), ({"pre": "mystery"}, "'mystery' is not")],
)
def test_gguf_tokenizers_that_cannot_be_built_are_refused_by_name(tmp_path, kinds, reason):
    with pytest.raises(ValueError, match=reason):
        Tokenizer.from_checkpoint(write_gguf(tmp_path / "a.gguf", **kinds))


@pytest.fixture(scope="module")
def sentencepiece_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with the stored sentencepiece vocabulary."""
    path = tmp_path_factory.mktemp("sentencepiece") / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(SENTENCEPIECE["pieces"])
    writer.add_token_scores(SENTENCEPIECE["scores"])
    writer.add_token_types(SENTENCEPIECE["types"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", SENTENCEPIECE["tokens"], ids=lambda case: ascii(case["text"][:20]))
def test_sentencepiece_ids_from_gguf_are_those_of_sentencepiece(sentencepiece_path, case):
    tokenizer = Tokenizer.from_checkpoint(sentencepiece_path)
    assert tokenizer.encode(case["text"]) == [1, *case["ids"]]
    assert tokenizer.decode(case["ids"]) == case["text"]


def test_sentencepiece_special_tokens_from_gguf(sentencepiece_path):
    tokenizer = Tokenizer.from_checkpoint(sentencepiece_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})
    assert tokenizer.encode("<s>a")[:2] == [1, tokenizer.encode("a")[1]]
    assert tokenizer.encode("a<tool>")[-1] == SENTENCEPIECE["pieces"].index("<tool>")


def test_the_text_package_imports_no_jax():
    modules = "tokenizer, detokenizer, chat_template, eos, gguf_tokenizer"
    code = f"from neojax.text import {modules}; import sys; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

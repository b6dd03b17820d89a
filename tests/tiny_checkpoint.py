"""A Llama of two layers as a Hugging Face directory without weights: for `--load-format dummy`.

Its tokenizer has one token per byte and the ChatML markers, so that any text can be encoded.

    python tests/tiny_checkpoint.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = MARKERS[2]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """256 byte tokens with ids 0..255 in the order of their characters, then the markers."""
    vocab = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return tokenizer


def write_tiny_checkpoint(directory: Path, **overrides: object) -> Path:
    """Writes config.json and the tokenizer's files; overrides replace entries of config.json.

    By default L=2, D=64, N=4, K=2, H=16, F=128, V=259 and 512 positions.
    """
    tokenizer = byte_tokenizer()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.token_to_id(MARKERS[0]),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "torch_dtype": "float32",
    } | overrides
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": MARKERS[0],
        "eos_token": EOS,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in (("config", config), ("tokenizer_config", tokenizer_config)):
        text = json.dumps(content, indent=2) + "\n"
        (directory / f"{name}.json").write_text(text, encoding="utf-8")
    return directory


if __name__ == "__main__":
    print(write_tiny_checkpoint(Path(sys.argv[1])))

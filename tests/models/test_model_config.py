"""What config.json and GGUF metadata may say, and what is refused by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from neojax.models.config import ModelConfig
from neojax.models.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    PerFrequencyRopeScaling,
    attention_factor,
    inverse_frequencies,
)

PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {
    "factor": 32,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
SCALING = Llama3RopeScaling(32.0, 1.0, 4.0, 8192)


def read(directory: Path, **changes: object) -> ModelConfig:
    """Config of PLAIN with changes; `...` takes a key away."""
    raw = {key: value for key, value in (PLAIN | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_checkpoint(directory)


def test_llama_3_2_1b_is_read_with_its_sizes(tmp_path):
    config = read(tmp_path, rope_scaling=LLAMA3 | {"rope_type": "llama3"})
    assert config.head_dim == 64
    assert (config.q_size, config.kv_size) == (2048, 512)
    assert config.num_parameters == 1_235_814_400
    assert config.rope_scaling == SCALING
    assert config.name == tmp_path.name
    assert hash(config) == hash(read(tmp_path, rope_scaling=LLAMA3 | {"rope_type": "llama3"}))


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 500000.0, None),
        ({"rope_scaling": None}, 500000.0, None),
        ({"rope_theta": ...}, 10000.0, None),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3"}}, 500000.0, SCALING),
        ({"rope_scaling": LLAMA3 | {"type": "llama3"}}, 500000.0, SCALING),
        ({"rope_scaling": LLAMA3 | {"type": "x", "rope_type": "llama3"}}, 500000.0, SCALING),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 500000.0, LinearRopeScaling(2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, 500000.0, None),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            500000.0,
            None,
        ),
        (
            {
                "rope_theta": None,
                "rope_scaling": None,
                "rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5},
            },
            500000.0,
            SCALING,
        ),
    ],
)
def test_rope_is_read_from_both_layouts(tmp_path, changes, theta, scaling):
    config = read(tmp_path, **changes)
    assert config.rope_theta == theta
    assert config.rope_scaling == scaling


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"head_dim": None}, {"head_dim": 64}),
        ({"hidden_size": 1792, "num_attention_heads": 24, "head_dim": 128}, {"head_dim": 128}),
        ({"hidden_size": 96, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 32},
         {"q_size": 160, "kv_size": 32}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 32}),
        ({"tie_word_embeddings": ...}, {"tie_embeddings": False}),
        ({"torch_dtype": ..., "dtype": "float16"}, {"num_layers": 16}),
        ({"architectures": None, "model_type": "llama"}, {"num_layers": 16}),
    ],
)  # fmt: skip
def test_null_missing_and_explicit_values(tmp_path, changes, expected):
    config = read(tmp_path, **changes)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
        ({"architectures": None}, "unknown is not supported"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "foo", "factor": 2}}, "'foo' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "needs low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "needs long_factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
            "1 rope factors for head_dim 64",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": 2050}, "not a multiple of num_attention_heads"),
        ({"num_key_value_heads": 5}, "not a multiple of num_kv_heads"),
        ({"head_dim": 63}, "even head_dim"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(tmp_path, changes, named):
    with pytest.raises(ValueError, match=named) as raised:
        read(tmp_path, **changes)
    assert "config.json" in str(raised.value)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("Mistral", {"sliding_window": None}, (131072, None)),
        ("Mistral", {"sliding_window": 4096}, (131072, 4096)),
        ("Mistral", {"sliding_window": 131072}, (131072, None)),
        ("Mistral", {}, (131072, 4096)),
        ("Phi3", {"sliding_window": 2047}, (131072, 2047)),
        ("Phi3", {}, (131072, None)),
        ("Qwen2", {"sliding_window": 4096}, (131072, None)),
        ("Qwen2", {"sliding_window": 4096, "use_sliding_window": True}, (131072, None)),
        # All layers look through the window; only some do.
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0}, (131072, 4096)),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": 4}, (4096, None)),
        ("Llama", {"sliding_window": 4096}, (131072, None)),
    ],
)
def test_a_window_of_some_layers_limits_the_context_to_where_full_attention_is_exact(
    tmp_path, family, changes, expected
):
    config = read(tmp_path, architectures=[f"{family}ForCausalLM"], **changes)
    assert (config.max_position_embeddings, config.sliding_window) == expected


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", (False, False, 64)),
        ("MistralForCausalLM", (False, False, 64)),
        ("Qwen2ForCausalLM", (True, False, 64)),
        ("Qwen3ForCausalLM", (False, True, 128)),
        ("Phi3ForCausalLM", (False, False, 64)),
    ],
)
def test_families_differ_in_biases_head_norms_and_default_head_dim(
    tmp_path, architecture, expected
):
    config = read(tmp_path, architectures=[architecture])
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == expected


def test_yarn_stretches_the_context_and_its_factor_follows_the_length(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = read(tmp_path, max_position_embeddings=32768, rope_scaling=scaling)
    assert config.max_position_embeddings == 131072
    assert attention_factor(config.rope_scaling) == pytest.approx(0.1 * np.log(4) + 1)
    stated = read(tmp_path, rope_scaling=scaling | {"attention_factor": 1.5})
    assert attention_factor(stated.rope_scaling) == 1.5
    assert attention_factor(SCALING) == 1.0


def test_dynamic_rope_stretches_the_context(tmp_path):
    scaling = {"type": "dynamic", "factor": 2.0}
    config = read(tmp_path, max_position_embeddings=4096, rope_scaling=scaling)
    assert config.max_position_embeddings == 8192
    assert config.rope_scaling == DynamicRopeScaling(2.0, 4096)


LONGROPE = {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": LONGROPE | {"type": "su"}}, (4096, (1 + 5 / 12) ** 0.5)),
        (
            {"rope_scaling": LONGROPE | {"type": "longrope", "factor": 4.0}},
            (4096, (1 + 1 / 6) ** 0.5),
        ),
        ({"rope_scaling": LONGROPE | {"type": "longrope", "attention_factor": 1.5}}, (4096, 1.5)),
        (
            {
                "original_max_position_embeddings": ...,
                "rope_parameters": LONGROPE
                | {"rope_type": "longrope", "original_max_position_embeddings": 8192},
            },
            (8192, (1 + 4 / 13) ** 0.5),
        ),
    ],
)
def test_longrope_is_read_from_every_layout(tmp_path, changes, expected):
    changes = {"original_max_position_embeddings": 4096} | changes
    scaling = read(tmp_path, architectures=["Phi3ForCausalLM"], **changes).rope_scaling
    assert isinstance(scaling, LongRopeScaling)
    assert (scaling.original_max_position_embeddings, scaling.attention_factor) == (
        expected[0],
        pytest.approx(expected[1]),
    )


def test_longrope_takes_short_factors_where_the_context_is_the_original_one():
    scaling = LongRopeScaling((1.0,) * 32, (4.0,) * 32, 4096, 1.2)
    plain = inverse_frequencies(64, 10000.0, None)
    np.testing.assert_array_equal(inverse_frequencies(64, 10000.0, scaling, 4096), plain)
    np.testing.assert_array_equal(inverse_frequencies(64, 10000.0, scaling, 4097), plain / 4)
    assert attention_factor(scaling) == 1.2


@pytest.mark.parametrize(("text", "named"), [(None, "no config"), ("{", "JSON"), ("[]", "list")])
def test_a_missing_or_broken_file_is_named(tmp_path, text, named):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_checkpoint(tmp_path)


def test_the_default_model_is_read_from_its_gguf_file(default_checkpoint):
    config = ModelConfig.from_checkpoint(default_checkpoint)
    assert config == ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        max_position_embeddings=8192,
        tie_embeddings=True,
        name="SmolLM2-135M-Instruct.Q4_1",
    )
    assert config.num_parameters == 134_515_008


def write_gguf(path: Path, architecture: str = "llama", **changes: object) -> Path:
    """Metadata of a small model without tensors; in `changes` two underscores stand for a dot."""
    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        "vocab_size": 32,
        "context_length": 8192,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 128,
        "attention__head_count": 4,
        "attention__head_count_kv": 2,
    } | changes
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    for key, value in keys.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"head_dim": 16, "tie_embeddings": True, "rms_norm_eps": 1e-6}),
        ({"attention__head_count_kv": [2, 2]}, {"num_kv_heads": 2}),
        ({"attention__key_length": 32, "attention__value_length": 32}, {"head_dim": 32}),
        ({"attention__sliding_window": 4096}, {"sliding_window": 4096}),
        ({"architecture": "qwen2"}, {"qkv_bias": True}),
        ({"architecture": "qwen3"}, {"qk_norm": True}),
    ],
)
def test_gguf_metadata_gives_the_config(tmp_path, changes, expected):
    config = ModelConfig.from_checkpoint(write_gguf(tmp_path / "a.gguf", **changes))
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "mamba"}, "'mamba' is not supported"),
        ({"expert_count": 8}, "mixture-of-experts"),
        ({"attention__head_count_kv": [2, 1]}, "differs between layers"),
        ({"rope__dimension_count": 8}, "rope.dimension_count 8 differs"),
        ({"rope__scaling__type": "yarn"}, "'yarn' is not supported"),
        ({"rope__scaling__type": "linear"}, "rope.scaling.factor is missing"),
    ],
)
def test_gguf_metadata_that_is_not_computed_here_is_refused_by_name(tmp_path, changes, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        ModelConfig.from_checkpoint(write_gguf(tmp_path / "a.gguf", **changes))


def test_llama3_frequencies_keep_short_wavelengths_and_divide_long_ones():
    plain = inverse_frequencies(64, 500000.0, None)
    scaled = inverse_frequencies(64, 500000.0, SCALING)
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 32, rtol=1e-6)
    assert (np.diff(scaled) < 0).all()
    factors = tuple((plain / scaled).tolist())
    as_gguf = inverse_frequencies(64, 500000.0, PerFrequencyRopeScaling(factors))
    np.testing.assert_allclose(as_gguf, scaled, rtol=1e-6)


def test_factors_must_be_as_many_as_frequencies():
    with pytest.raises(ValueError, match="3 rope factors for head_dim 8"):
        ModelConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            rope_scaling=PerFrequencyRopeScaling((1.0, 1.0, 1.0)),
        )


def test_configs_are_read_without_jax(tmp_path):
    read(tmp_path)
    code = (
        "import sys; from pathlib import Path; from neojax.models.config import ModelConfig;"
        f"ModelConfig.from_checkpoint(Path({str(tmp_path)!r})); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""A model that float16 cannot hold: an error for the request that overflows, not nonsense."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from neojax import LLM, SamplingParams
from tests.models import golden_models
from tests.tiny_checkpoint import write_tiny_checkpoint

NAME = "mha_h64"  # untied: no logits grow with the token below
BAD = 17
"""A token whose hidden state float16 can just hold, so that a layer's sum overflows."""
PROMPTS = [[5, 9, 200], [40, BAD], list(range(60, 90))]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """float16, with both pools."""
    directory = tmp_path_factory.mktemp("overflow")
    golden_models.write_checkpoint(directory, NAME)
    tensors = golden_models.weights(golden_models.CONFIGS[NAME])
    embedding = tensors["model.embed_tokens.weight"]
    embedding[BAD] = 65000.0 * np.sign(embedding[BAD])
    for name, tensor in tensors.items():
        if "down_proj" in name:
            tensor *= 1000.0
    save_file(tensors, directory / "model.safetensors")
    tokenizer = write_tiny_checkpoint(tmp_path_factory.mktemp("tokenizer"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, directory / name)
    llm = LLM(
        str(directory),
        dtype="float16",
        max_model_len=48,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        cpu_kv_gib=0.05,
        enforce_eager=True,
    )
    yield llm
    llm.close()


@pytest.mark.parametrize("policy", ["device-only", "full"])
def test_the_request_that_overflows_ends_with_an_error_and_the_others_go_on(llm, policy):
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm.set_policy(policy)
    before = llm.engine.stats().num_not_finite
    first, bad, last = llm.generate(PROMPTS, greedy, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].token_ids == []
    assert llm.engine.stats().num_not_finite == before + 1
    others = llm.generate([PROMPTS[0], PROMPTS[2]], greedy, use_tqdm=False)
    for output, alone in zip((first, last), others, strict=True):
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids

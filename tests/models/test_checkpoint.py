"""Checkpoints of every layout and type, and everything that can be wrong with one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from neojax.models.checkpoint import load_model
from neojax.models.config import ModelConfig
from neojax.models.gguf_file import open_gguf
from neojax.models.llama import Llama
from neojax.models.safetensors_checkpoint import INDEX_FILE, SINGLE_FILE, SafetensorsCheckpoint
from tests.models import golden_models

NAME = "mha_h64"  # untied, so that it has every tensor
CONFIG = golden_models.CONFIGS[NAME]
WEIGHTS = golden_models.weights(CONFIG)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def load(path: Path, dtype: object = jnp.float32, load_format: str = "auto") -> Llama:
    config = ModelConfig.from_checkpoint(path)
    return load_model(path, config, dtype=dtype, load_format=load_format, progress=False)


def write_single(directory: Path, tensors: dict[str, np.ndarray], **changes: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors, directory / SINGLE_FILE)
    return directory


def write_sharded(directory: Path, num_shards: int = 3) -> Path:
    """Tensors dealt out in turn, so that the parts of a fused parameter lie in several shards."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = list(WEIGHTS)[shard::num_shards]
        save_file({name: WEIGHTS[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def assert_holds_weights(model: Llama, dtype: object = np.float32) -> None:
    """Every parameter is what the tensors say, in the right rows."""

    def tensor(name: str) -> np.ndarray:
        return WEIGHTS[f"{name}.weight"].astype(dtype)

    def equal(param: nnx.Param, *names: str) -> None:
        value = np.asarray(param[...])
        assert value.dtype == dtype
        np.testing.assert_array_equal(value, np.concatenate([tensor(name) for name in names]))

    equal(model.ends.embedding, "model.embed_tokens")
    equal(model.ends.norm.weight, "model.norm")
    equal(model.ends.lm_head, "lm_head")
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        equal(layer.input_norm.weight, f"{prefix}input_layernorm")
        equal(layer.qkv.weight, *(f"{attention}{x}_proj" for x in "qkv"))
        equal(layer.o.weight, f"{attention}o_proj")
        equal(layer.post_norm.weight, f"{prefix}post_attention_layernorm")
        equal(layer.gate_up.weight, f"{mlp}gate_proj", f"{mlp}up_proj")
        equal(layer.down.weight, f"{mlp}down_proj")


def test_a_single_file_and_shards_give_the_same_parameters(tmp_path):
    assert_holds_weights(load(write_single(tmp_path / "single", WEIGHTS)))
    assert_holds_weights(load(write_sharded(tmp_path / "sharded")))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("asked", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_stored_types_are_kept_bit_for_bit_or_converted_once(tmp_path, stored, asked):
    tensors = {name: value.astype(stored) for name, value in WEIGHTS.items()}
    model = load(write_single(tmp_path, tensors), dtype=asked)
    expected = tensors[Q_PROJ].astype(asked)
    rows = model.layers[1].qkv.weight[...][: len(expected)]
    np.testing.assert_array_equal(np.asarray(rows), expected)


def test_types_may_be_mixed_in_one_file(tmp_path):
    tensors = dict(WEIGHTS)
    for name in list(tensors)[::2]:
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    model = load(write_single(tmp_path, tensors))
    rows = np.asarray(model.layers[1].qkv.weight[...][:128])
    np.testing.assert_array_equal(rows, tensors[Q_PROJ].astype(np.float32))


def test_a_value_too_large_for_float16_is_an_error_and_not_an_infinity(tmp_path):
    tensors = WEIGHTS | {Q_PROJ: np.full_like(WEIGHTS[Q_PROJ], 7e4)}
    directory = write_single(tmp_path, tensors)
    with pytest.raises(ValueError, match=rf"{re.escape(Q_PROJ)}.*bfloat16"):
        load(directory, dtype=jnp.float16)
    load(directory, dtype=jnp.bfloat16)


def test_only_the_files_that_the_index_names_are_read(tmp_path):
    directory = write_sharded(tmp_path)
    zeros = {name: np.zeros_like(value) for name, value in WEIGHTS.items()}
    save_file(zeros, directory / "consolidated.safetensors")
    save_file(zeros, directory / SINGLE_FILE)
    (directory / "sub").mkdir()
    save_file(zeros, directory / "sub" / SINGLE_FILE)
    assert_holds_weights(load(directory))


def test_a_redundant_output_of_a_tied_model_and_stored_rope_tables_are_left_alone(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(32, np.float32)}
    model = load(write_single(tmp_path, WEIGHTS | extra, tie_word_embeddings=True))
    assert not hasattr(model.ends, "lm_head")
    leaves = jax.tree.leaves(nnx.state(model))
    assert sum(leaf.size for leaf in leaves) == model.config.num_parameters


def without(name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in WEIGHTS.items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (without(Q_PROJ), rf"missing: {Q_PROJ} \(128, 128\)"),
        (without("lm_head.weight"), r"missing: lm_head\.weight"),
        (WEIGHTS | {"model.layers.0.extra": np.zeros(3)}, r"left over: .*layers\.0\.extra \(3,\)"),
        (WEIGHTS | {"model.layers.2.norm": np.zeros(2)}, r"left over: .*layers\.2\.norm"),
        (
            WEIGHTS | {"model.layers.0.mlp.up_proj.weight": np.zeros((128, 112), np.float32)},
            r"wrong shape: .*up_proj.weight is \(128, 112\), expected \(112, 128\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused_by_tensor(tmp_path, tensors, named):
    with pytest.raises(ValueError, match=named):
        load(write_single(tmp_path, tensors))


def test_all_problems_come_in_one_error(tmp_path):
    tensors = without(Q_PROJ) | {"a": np.zeros(1), "model.norm.weight": np.zeros(5)}
    with pytest.raises(ValueError, match="3 problems") as raised:
        load(write_single(tmp_path, tensors))
    for word in ("missing", "left over", "wrong shape", str(tmp_path)):
        assert word in str(raised.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_numbers_are_found_before_the_first_answer(tmp_path, value):
    damaged = WEIGHTS[Q_PROJ].copy()
    damaged[-1, -1] = value
    with pytest.raises(ValueError, match=rf"damaged: NaN or infinite values in .*{Q_PROJ}"):
        load(write_single(tmp_path, WEIGHTS | {Q_PROJ: damaged}))


def remove_shard(directory: Path) -> None:
    (directory / "model-00002-of-00003.safetensors").unlink()


def truncate(size: int) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        file = directory / "model-00001-of-00003.safetensors"
        os.truncate(file, size if size >= 0 else file.stat().st_size + size)

    return change


def lengthen(directory: Path) -> None:
    with (directory / "model-00003-of-00003.safetensors").open("ab") as file:
        file.write(b"\0")


def misplace(directory: Path) -> None:
    edit_index(directory, {Q_PROJ: "model-00001-of-00003.safetensors"})


def name_unknown(directory: Path) -> None:
    edit_index(directory, {"model.layers.9.x": "model-00001-of-00003.safetensors"})


def edit_index(directory: Path, changes: dict[str, str]) -> None:
    index = json.loads((directory / INDEX_FILE).read_text())
    index["weight_map"] |= changes
    (directory / INDEX_FILE).write_text(json.dumps(index))


def break_index(directory: Path) -> None:
    (directory / INDEX_FILE).write_text("{}")


def stale_index(directory: Path) -> None:
    """A single full file next to an index whose shards are gone."""
    for file in directory.glob("model-*.safetensors"):
        file.unlink()
    save_file(WEIGHTS, directory / SINGLE_FILE)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (remove_shard, r"incomplete.*model-00002-of-00003\.safetensors"),
        (truncate(-1), r"model-00001-of-00003\.safetensors is incomplete"),
        (truncate(4), r"model-00001-of-00003\.safetensors is incomplete"),
        (truncate(100), r"model-00001-of-00003\.safetensors is incomplete"),
        (truncate(0), r"model-00001-of-00003\.safetensors is incomplete"),
        (lengthen, r"model-00003-of-00003\.safetensors is incomplete"),
        (misplace, "the index is not of these files"),
        (name_unknown, r"names tensors that its files do not hold: model\.layers\.9\.x"),
        (break_index, "not a safetensors index"),
        (stale_index, "incomplete.*model-00001-of-00003"),
    ],
)
def test_incomplete_shards_stop_the_start_and_name_the_file(tmp_path, damage, named):
    directory = write_sharded(tmp_path)
    damage(directory)
    with pytest.raises(ValueError, match=named):
        load(directory)


def test_a_tensor_in_two_shards_is_an_error_with_both(tmp_path):
    directory = write_sharded(tmp_path)
    weight_map = json.loads((directory / INDEX_FILE).read_text())["weight_map"]
    home = weight_map[Q_PROJ]
    other = next(file for file in weight_map.values() if file != home)
    shard = {name: WEIGHTS[name] for name, file in weight_map.items() if file == other}
    save_file(shard | {Q_PROJ: WEIGHTS[Q_PROJ] * 2}, directory / other)
    with pytest.raises(ValueError, match=f"{other} holds {Q_PROJ}.* places in {home}"):
        load(directory)


def test_a_name_that_stands_twice_is_an_error(tmp_path):
    entry = '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    text = f"{{{entry}, {entry}}}".encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged.*a stands there twice"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"b": "x", "b": "y"}}')
    with pytest.raises(ValueError, match=r"index\.json is not a safetensors index.*b stands"):
        SafetensorsCheckpoint(tmp_path)


def test_a_directory_without_weights_says_what_is_there(tmp_path):
    directory = write_single(tmp_path, WEIGHTS)
    (directory / SINGLE_FILE).rename(directory / "other.safetensors")
    with pytest.raises(ValueError, match=r"neither .*other\.safetensors"):
        load(directory)


def test_types_that_are_not_weights_are_refused_by_tensor(tmp_path):
    tensors = WEIGHTS | {Q_PROJ: np.zeros((128, 128), np.int8)}
    with pytest.raises(ValueError, match=rf"{Q_PROJ} has type I8; supported: F64, F32, F16, BF16"):
        load(write_single(tmp_path, tensors))


def test_a_header_whose_bytes_overlap_is_damaged(tmp_path):
    header = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    }
    text = json.dumps(header).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    with pytest.raises(ValueError, match="damaged: the bytes of b"):
        SafetensorsCheckpoint(tmp_path)


def load_counting_buffers(
    directory: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[np.ndarray], jax.Array]
) -> tuple[Llama, list[int]]:
    """A model, and the bytes of each buffer that parameters were put together in."""
    sizes: list[int] = []
    empty = np.empty

    def counting(shape, dtype=float, **more):
        array = empty(shape, dtype, **more)
        sizes.append(array.nbytes)
        return array

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", counting)
        patch.setattr(jax, "device_put", put)
        return load(directory), sizes


def test_the_cpu_backend_takes_the_buffers_over(tmp_path, monkeypatch):
    put = jax.device_put
    addresses = []

    def watched(buffer):
        addresses.append((buffer.ctypes.data, put(buffer).unsafe_buffer_pointer()))
        return put(buffer)

    model, sizes = load_counting_buffers(write_single(tmp_path, WEIGHTS), monkeypatch, watched)
    assert_holds_weights(model)
    assert len(sizes) == len(jax.tree.leaves(nnx.state(model)))
    assert all(ours == theirs for ours, theirs in addresses)


def test_where_the_device_copies_host_memory_holds_two_parameters_and_not_the_model(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    model, sizes = load_counting_buffers(
        write_single(tmp_path, WEIGHTS), monkeypatch, lambda buffer: jax.numpy.array(buffer)
    )
    assert_holds_weights(model)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert sum(sizes) < 3 * largest


def test_load_format_must_fit_the_path(tmp_path, default_checkpoint):
    directory = write_single(tmp_path, WEIGHTS)
    with pytest.raises(ValueError, match=r"'gguf' was asked for, but .* is a directory"):
        load(directory, load_format="gguf")
    with pytest.raises(ValueError, match=r"'safetensors' was asked for, but .* is a GGUF file"):
        load(default_checkpoint, load_format="safetensors")
    config = ModelConfig.from_checkpoint(directory)
    with pytest.raises(ValueError, match="needs a checkpoint"):
        load_model(None, config, dtype=jnp.float32)
    assert_holds_weights(load(directory, load_format="safetensors"))


def write_gguf(path: Path, types: dict[str, gguf.GGMLQuantizationType]) -> dict[str, np.ndarray]:
    """A file of one tensor per type, and what the library makes of them."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("numbers", [1.5, 2.5])
    writer.add_array("words", ["a", "é"])
    writer.add_bool("yes", True)
    rng = np.random.default_rng(0)
    expected = {}
    for name, kind in types.items():
        values = rng.normal(size=(6, 512)).astype(np.float32)
        stored = gguf.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        expected[name] = gguf.dequantize(stored, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_gguf_tensors_of_the_usual_types_are_dequantised(tmp_path):
    names = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
    types = {name: gguf.GGMLQuantizationType[name] for name in names}
    expected = write_gguf(tmp_path / "a.gguf", types)
    file = open_gguf(tmp_path / "a.gguf")
    assert file.metadata["numbers"] == [1.5, 2.5]
    assert file.metadata["words"] == ["a", "é"]
    assert file.metadata["yes"] is True
    for name, values in expected.items():
        read = file.read(name)
        assert read.dtype == np.float32
        assert read.shape == (6, 512)
        np.testing.assert_array_equal(read, values)


def test_gguf_files_are_read_as_the_library_reads_them(tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, {f"t{i}": gguf.GGMLQuantizationType.Q4_1 for i in range(4)})
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    for key, value in ours.metadata.items():
        assert theirs.fields[key].contents() == value
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.read(tensor.name), values)


@pytest.mark.parametrize("size", [0, 3, 20, 100, -1])
def test_a_truncated_gguf_file_is_incomplete(tmp_path, size):
    path = tmp_path / "a.gguf"
    write_gguf(path, {"a": gguf.GGMLQuantizationType.Q8_0})
    os.truncate(path, size if size >= 0 else path.stat().st_size - 31)
    with pytest.raises(ValueError, match=r"a\.gguf is incomplete"):
        open_gguf(path)


def test_another_file_named_gguf_is_not_taken_for_one(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ValueError, match="does not begin with GGUF"):
        open_gguf(tmp_path / "a.gguf")


def test_a_gguf_type_that_cannot_be_dequantised_is_named(tmp_path, monkeypatch):
    write_gguf(tmp_path / "a.gguf", {"a": gguf.GGMLQuantizationType.Q8_0})

    def refuse(data, kind):
        raise NotImplementedError

    monkeypatch.setattr(gguf, "dequantize", refuse)
    with pytest.raises(ValueError, match="a has type Q8_0"):
        open_gguf(tmp_path / "a.gguf").read("a")

"""python -m neojax.convert: the same model in another form, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from neojax import convert as convert_module
from neojax.convert import convert
from neojax.models.checkpoint import load_model
from neojax.models.config import ModelConfig
from neojax.models.hf_config_writer import hf_config
from neojax.models.manifest import MANIFEST_FILE
from neojax.models.orbax_checkpoint import OrbaxCheckpoint, write_orbax
from neojax.models.partial_directory import PartialDirectory
from neojax.models.rope_scaling import PerFrequencyRopeScaling
from neojax.models.safetensors_checkpoint import SafetensorsCheckpoint
from neojax.text.eos import eos_token_ids
from neojax.text.tokenizer import Tokenizer
from tests.models import golden_models


def parameters(path: Path) -> nnx.State:
    config = ModelConfig.from_checkpoint(path)
    return nnx.state(load_model(path, config, dtype=jnp.float32, progress=False))


def assert_same_parameters(ours: Path, theirs: Path) -> None:
    jax.tree.map(np.testing.assert_array_equal, parameters(ours), parameters(theirs))


def test_the_default_model_becomes_a_directory_that_says_the_same(default_checkpoint, tmp_path):
    directory = tmp_path / "smollm2"
    convert(default_checkpoint, directory, dtype="float32", progress=False)
    assert_same_parameters(directory, default_checkpoint)
    ours, theirs = (Tokenizer.from_checkpoint(path) for path in (directory, default_checkpoint))
    text = "<|im_start|>user\n1234 ďábelské 🌶️<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.chat_template == theirs.chat_template
    assert (ours.bos_id, ours.eos_token) == (theirs.bos_id, theirs.eos_token)
    assert eos_token_ids(directory) == eos_token_ids(default_checkpoint)


@pytest.mark.parametrize("name", golden_models.CONFIGS)
def test_configs_survive_being_written(name, tmp_path):
    source = golden_models.write_checkpoint(tmp_path / "m", name)
    config = ModelConfig.from_checkpoint(source)
    written = tmp_path / "w" / "m"
    written.mkdir(parents=True)
    (written / "config.json").write_text(json.dumps(hf_config(config, "float32")))
    assert ModelConfig.from_checkpoint(written) == config


def test_shards_hold_what_a_single_file_held(tmp_path):
    source = golden_models.write_checkpoint(tmp_path / "source", "qwen2")
    directory = tmp_path / "sharded"
    convert(source, directory, dtype="float32", max_shard_bytes=200_000, progress=False)
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 210_000 for file in files)
    assert_same_parameters(directory, source)
    ours, theirs = (ModelConfig.from_checkpoint(path) for path in (directory, source))
    assert dataclasses.replace(ours, name=theirs.name) == theirs


def test_a_narrower_type_halves_the_file_and_is_named_in_the_config(tmp_path):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    convert(source, tmp_path / "narrow", progress=False)
    sizes = [(path / "model.safetensors").stat().st_size for path in (source, tmp_path / "narrow")]
    assert sizes[1] < 0.52 * sizes[0]
    assert json.loads((tmp_path / "narrow/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert eos_token_ids(tmp_path / "narrow") == eos_token_ids(source)


def test_orbax_there_and_back_changes_nothing(tmp_path):
    source = golden_models.write_checkpoint(tmp_path / "source", "gqa3_h64")
    convert(
        source,
        tmp_path / "there",
        to="orbax",
        dtype="float32",
        max_shard_bytes=400_000,
        progress=False,
    )
    assert len(list((tmp_path / "there" / "orbax").iterdir())) > 2
    assert not list((tmp_path / "there").glob("*.safetensors"))
    assert_same_parameters(tmp_path / "there", source)
    convert(tmp_path / "there", tmp_path / "back", dtype="float32", progress=False)
    assert_same_parameters(tmp_path / "back", source)
    assert (tmp_path / "back" / "model.safetensors").is_file()


def test_orbax_keeps_narrow_types_and_a_tie(tmp_path):
    source = golden_models.write_checkpoint(tmp_path / "source", "gqa3_h64")
    convert(source, tmp_path / "narrow", to="orbax", progress=False)
    checkpoint = OrbaxCheckpoint(tmp_path / "narrow")
    assert "lm_head.weight" not in checkpoint.shapes
    values = checkpoint.read("model.norm.weight")
    assert values.dtype == ml_dtypes.bfloat16
    stored = golden_models.weights(golden_models.CONFIGS["gqa3_h64"])["model.norm.weight"]
    np.testing.assert_array_equal(values, stored.astype(ml_dtypes.bfloat16))


def test_an_orbax_checkpoint_written_on_eight_devices_loads_on_one(tmp_path):
    """The arrays were sharded over a mesh that is not there any more."""
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    directory = tmp_path / "sharded"
    directory.mkdir()
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    code = """
import sys
import jax, orbax.checkpoint as ocp
from pathlib import Path
from neojax.models.safetensors_checkpoint import SafetensorsCheckpoint
source, target = SafetensorsCheckpoint(Path(sys.argv[1])), Path(sys.argv[2])
mesh = jax.sharding.Mesh(jax.devices(), ("x",))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
assert len(jax.devices()) == 8
tree = {name: jax.device_put(source.read(name), split) for name in source.shapes}
ocp.PyTreeCheckpointer().save(target / "orbax", tree)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, str(source), str(directory)]
    subprocess.run(command, check=True, env=os.environ | flags)
    assert len(jax.devices()) == 1
    assert_same_parameters(directory, source)


@pytest.mark.parametrize("damage", ["_METADATA", "manifest.ocdbt", "d", "."])
def test_a_damaged_orbax_directory_is_named(tmp_path, damage):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    convert(source, tmp_path / "out", to="orbax", progress=False)
    (weights,) = (tmp_path / "out" / "orbax").iterdir()
    if (weights / damage).is_dir():
        shutil.rmtree(weights / damage)
        weights.mkdir(exist_ok=True)
    else:
        (weights / damage).unlink()
    # In a process of its own: what Orbax had begun to read complains when it is collected.
    command = [sys.executable, "-m", "neojax.convert", str(tmp_path / "out"), str(tmp_path / "x")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"neojax: {weights} is not a readable Orbax checkpoint" in result.stderr


def test_an_orbax_checkpoint_that_lacks_a_tensor_is_refused_by_tensor(tmp_path):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = golden_models.weights(golden_models.CONFIGS["mha_h64"])
    del tensors["model.norm.weight"]
    shapes = {name: value.shape for name, value in tensors.items()}
    write_orbax(directory, shapes, lambda name: tensors[name], np.dtype(np.float32))
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight"):
        parameters(directory)


def convert_with_a_full_disk(
    source: Path, destination: Path, to: str, limit: int, max_shard_bytes: int
) -> subprocess.CompletedProcess[str]:
    """The command, where no file may grow beyond `limit` bytes: what a full disk looks like.

    What it says is on stdout: on stderr Orbax's threads may speak at any moment, within a line too.
    """
    code = f"""
import resource, signal
from pathlib import Path
from neojax.convert import convert
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    convert(Path({str(source)!r}), Path({str(destination)!r}), to={to!r}, dtype="float32",
            max_shard_bytes={max_shard_bytes}, progress=False)
except OSError as error:
    print(error)
    raise SystemExit(1)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, to):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    out = tmp_path / "out" / "model"
    result = convert_with_a_full_disk(source, out, to, 100_000, 10**9)
    assert result.returncode == 1
    assert f"{tmp_path / 'out'}" in result.stdout, result.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_what_was_finished_before_the_disk_was_full_is_kept_and_not_written_again(tmp_path):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    out = tmp_path / "out"
    # The embedding, 164 kB, is the first shard; the first that is larger fails.
    result = convert_with_a_full_disk(source, out, "safetensors", 180_000, 190_000)
    partial = tmp_path / ".out.partial"
    assert f"kept in {partial}: run the same command to go on" in result.stdout
    assert not out.exists()
    kept = sorted(file.name for file in partial.glob("*.safetensors"))
    assert kept
    assert not list(partial.glob("*.tmp"))
    stamp = (partial / kept[0]).stat().st_mtime_ns
    convert(source, out, dtype="float32", max_shard_bytes=190_000, progress=False)
    assert (out / kept[0]).stat().st_mtime_ns == stamp
    assert not partial.exists()
    assert_same_parameters(out, source)


def interrupt(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the tensor of that number is read."""
    read = SafetensorsCheckpoint.read
    calls = []

    def counted(self, name):
        calls.append(name)
        if len(calls) == at:
            raise KeyboardInterrupt
        return read(self, name)

    monkeypatch.setattr(SafetensorsCheckpoint, "read", counted)


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch, to):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    arguments = {"to": to, "dtype": "float32", "max_shard_bytes": 300_000, "progress": False}
    with monkeypatch.context() as patch:
        interrupt(15, patch)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        interrupt(10**9, patch)
        reads = []
        read = SafetensorsCheckpoint.read
        patch.setattr(
            SafetensorsCheckpoint, "read", lambda s, name: (reads.append(name), read(s, name))[1]
        )
        convert(source, tmp_path / "out", **arguments)
    num_tensors = len(SafetensorsCheckpoint(source).shapes)
    assert 0 < len(reads) < num_tensors - 5
    assert_same_parameters(tmp_path / "out", source)


@pytest.mark.parametrize("change", ["dtype", "source"])
def test_what_another_run_left_is_cleared(tmp_path, monkeypatch, change):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    with monkeypatch.context() as patch:
        interrupt(20, patch)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", max_shard_bytes=200_000, progress=False)
    if change == "source":
        golden_models.save_file(
            golden_models.weights(golden_models.CONFIGS["mha_h64"], seed=1),
            source / "model.safetensors",
        )
    convert(source, tmp_path / "out", dtype="float32", max_shard_bytes=200_000, progress=False)
    assert_same_parameters(tmp_path / "out", source)


def test_two_runs_do_not_write_the_same_directory(tmp_path):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    with (
        PartialDirectory(tmp_path / "out", "manifest.json", "x"),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        convert(source, tmp_path / "out", progress=False)


def test_too_little_room_is_found_before_the_first_tensor(tmp_path, monkeypatch):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    monkeypatch.setattr("neojax.convert.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"take 0\.\d GB, but .* has 0\.0 GB free"):
        convert(source, tmp_path / "out" / "model", progress=False)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_manifest_says_what_the_weights_were_made_for(tmp_path):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    convert(source, tmp_path / "out", progress=False)
    manifest = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert (manifest["format"], manifest["dtype"]) == ("safetensors", "bfloat16")
    assert manifest["config"]["num_heads"] == 2
    assert list(manifest["source_files"]) == ["source/config.json", "source/model.safetensors"]
    edit_json(tmp_path / "out" / "config.json", max_position_embeddings=64)  # may be
    parameters(tmp_path / "out")


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        # The same shapes: nothing else would tell.
        (
            "config.json",
            {"num_attention_heads": 4, "num_key_value_heads": 4},
            "num_heads is 4, the weights were written for 2; .*head_dim is 32",
        ),
        ("config.json", {"rope_theta": 1e6}, r"rope_theta is 1000000\.0"),
        (MANIFEST_FILE, {"format": "orbax"}, "says that the weights are orbax, found safetensors"),
        (MANIFEST_FILE, {"config_sha256": "0"}, "config_sha256 is not the hash"),
        (MANIFEST_FILE, {"config": None}, "config_sha256 is not the hash"),
    ],
)
def test_a_config_that_the_weights_were_not_made_for_is_refused(tmp_path, file, changes, named):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    convert(source, tmp_path / "out", progress=False)
    edit_json(tmp_path / "out" / file, **changes)
    with pytest.raises(ValueError, match=named) as raised:
        parameters(tmp_path / "out")
    assert file in str(raised.value)


def test_a_missing_part_of_an_orbax_checkpoint_is_named(tmp_path):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    convert(source, tmp_path / "out", to="orbax", max_shard_bytes=150_000, progress=False)
    parts = sorted((tmp_path / "out" / "orbax").iterdir())
    assert len(parts) > 2
    shutil.rmtree(parts[1])
    with pytest.raises(ValueError, match=r"incomplete: it holds part-00001-of-0000\d, part-00003"):
        parameters(tmp_path / "out")


def test_values_beyond_float16_are_refused_by_tensor(tmp_path):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    tensors = golden_models.weights(golden_models.CONFIGS["mha_h64"])
    tensors["model.norm.weight"][3] = 1e5
    golden_models.save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight .* not finite as float16"):
        convert(source, tmp_path / "out", dtype="float16", progress=False)
    assert not (tmp_path / "out").exists()


def test_an_existing_destination_is_left_alone(tmp_path):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    with pytest.raises(ValueError, match="exists already"):
        convert(source, source, progress=False)


def test_a_rope_that_config_json_cannot_express_is_refused(tmp_path):
    config = ModelConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rope_scaling=PerFrequencyRopeScaling((1.0,) * 4),
    )
    with pytest.raises(ValueError, match=r"config\.json cannot say that"):
        hf_config(config, "float32")


def test_the_command_prints_the_directory_or_what_is_wrong(tmp_path):
    source = golden_models.write_checkpoint(tmp_path / "source", "mha_h64")
    command = [sys.executable, "-m", "neojax.convert", str(source), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"{tmp_path / 'out'}\n"
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert again.stderr.splitlines()[-1].startswith("neojax:")
    assert "Traceback" not in again.stderr
    assert convert_module.DTYPES.keys() == {"float32", "bfloat16", "float16"}

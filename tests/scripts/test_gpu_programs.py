"""scripts/gpu_programs: what it reads out of a compiled program, and a tiny run where it can."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from neojax.ops import host_attention
from tests.scripts.as_module import SCRIPTS, as_module

HAS_PLUGIN = any(
    importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin")
)

# Cut out of what XLA makes of a linear stage for an H200.
GPU_TEXT = """HloModule jit_linear, is_scheduled=true

%fused_computation.18 (param_0.1: bf16[8,4096]) -> bf16[8,4096] {
  %param_0.1 = bf16[8,4096]{1,0} parameter(0)
  ROOT %multiply.1 = bf16[8,4096]{1,0} multiply(%param_0.1, %param_0.1)
}

%dynamic-slice-fusion (param_0.2: s32[64]) -> (s32[1], bf16[8,4096]) {
  %param_0.2 = s32[64]{0} parameter(0)
  ROOT %ffi_call.1 = (s32[1]{0}, bf16[8,4096]{1,0}) custom-call(%param_0.2), \
custom_call_target="neojax.start.v2", api_version=API_VERSION_TYPED_FFI
}

ENTRY %main.9 (ticket.1: s32[1], x.1: bf16[8,4096], w.1: bf16[4096,28672]) -> bf16[8,28672] {
  %ticket.1 = s32[1]{0} parameter(0), metadata={op_name="ticket"}
  %x.1 = bf16[8,4096]{1,0} parameter(1)
  %w.1 = bf16[4096,28672]{1,0} parameter(2)
  %ffi_call.6 = (bf16[8,4096]{1,0}, bf16[8,4096]{1,0}) custom-call(%ticket.1, %x.1), \
custom_call_target="neojax.join.v1", operand_layout_constraints={s32[1]{0}, bf16[8,4096]{1,0}}
  %ffi_call.7.0 = bf16[8,4096]{1,0} get-tuple-element(%ffi_call.6), index=0
  %fusion.22 = bf16[8,4096]{1,0} fusion(%ffi_call.7.0), kind=kCustom, calls=%fused_computation.18
  %custom-call.4 = (bf16[8,28672]{1,0}, s8[33554432]{0}) custom-call(%fusion.22, %w.1), \
custom_call_target="__cublas$lt$matmul", backend_config={"operation_queue_id":"0"}
  %pallas_call.0 = f32[8,32,128]{2,1,0} custom-call(%fusion.22), \
custom_call_target="__gpu$xla.gpu.triton"
  %copy.3 = bf16[8,4096]{1,0} copy(%x.1)
  %slice.2 = s32[6]{0} slice(%ticket.1), slice={[0:6]}
  %fusion.30 = (s32[1]{0}, bf16[8,4096]{1,0}) fusion(%slice.2), kind=kCustom, \
calls=%dynamic-slice-fusion
  ROOT %out = bf16[8,28672]{1,0} get-tuple-element(%custom-call.4), index=0
}
"""


@pytest.fixture(scope="module")
def script():
    return as_module("gpu_programs")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "gpu_programs"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_a_gpu_program_launches_is_read_in_order(script):
    assert list(script.launches(GPU_TEXT)) == [
        ("call", "neojax.join.v1", 2 * 8 * 4096),
        ("kernel", "fusion.22", 2 * 8 * 4096),
        ("matrix product", "custom-call.4", 2 * 8 * 28672),
        ("kernel", "pallas_call.0", 4 * 8 * 32 * 128),
        ("copy", "copy.3", 2 * 8 * 4096),
        ("kernel", "slice.2", 4 * 6),
        ("call", "neojax.start.v2", 4),
    ]


def test_a_program_of_the_cpu_backend_is_read_too(script):
    host_attention.ensure_registered()

    def step(rows, hdr, tie):
        ticket, tie = host_attention.start(rows, hdr, tie, lane=0, channel=0)
        return ticket, jnp.sin(tie) + 1

    shapes = (
        jax.ShapeDtypeStruct((8, 96), jnp.float32),
        jax.ShapeDtypeStruct((3,), jnp.int32),
        jax.ShapeDtypeStruct((4, 16), jnp.float32),
    )
    text = jax.jit(step).trace(*shapes).lower().compile().as_text()
    found = list(script.launches(text))
    assert [launch.name for launch in found if launch.kind == "call"] == ["neojax.start.v2"]
    kernels = [launch for launch in found if launch.kind == "kernel"]
    assert 4 * 4 * 16 in {kernel.num_bytes for kernel in kernels}
    assert {launch.kind for launch in found} <= {"call", "kernel", "copy"}


def test_graphs_are_counted_in_the_dump_and_the_dump_is_emptied(script, tmp_path):
    thunks = tmp_path / "module_0001.jit_layers.thunk_sequence_after_thunk_passes.txt"
    thunks.write_text("000: kCommandBuffer\n  000: kGemm\n001: kCustomCall\n002: kCommandBuffer\n")
    (tmp_path / "module_0001.jit_layers.before_optimizations.txt").write_text("kCommandBuffer")
    assert script.num_graphs(tmp_path) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(HAS_PLUGIN, reason="jax has a CUDA plugin here")
def test_without_the_plugin_it_says_what_to_install():
    result = run()
    assert result.returncode == 1
    assert "pip install 'jax[cuda12]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not HAS_PLUGIN, reason="needs jax's CUDA plugin; no GPU")
def test_every_mode_is_compiled_for_a_gpu_that_is_not_there():
    result = run("--layers", "2", "--batch", "8", "--rows", "4")
    assert result.returncode == 0, result.stderr[-4000:]
    lines = result.stdout.splitlines()[1:]
    names = [line.split(": ")[0].replace(", batch 8, ", " ") for line in lines]
    assert names == [
        "device_only layers", "pipelined linear 8 + 0", "pipelined linear 8 + 4",
        "pipelined linear 0 + 8", "pipelined attend", "rolling layers",
    ]  # fmt: skip
    for line in lines:
        assert ("4 matrix product" in line) == ("attend" not in line), line
    assert " call" not in lines[0]
    assert "2 call" in lines[2]
    assert "1 call" in lines[5]

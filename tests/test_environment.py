"""What the engine's process gets told before jax is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from neojax.environment import device_environment


def test_the_memory_share_is_the_flag_s():
    wanted = device_environment(0.8, {})
    assert wanted["XLA_CLIENT_MEM_FRACTION"] == "0.8"
    assert int(wanted["CUDA_DEVICE_MAX_CONNECTIONS"]) >= 8


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_users_own_choice_stands(name):
    # jaxlib raises when both spellings are set.
    wanted = device_environment(0.8, {name: "0.3", "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert wanted == {}


def test_no_jax_is_imported_for_it():
    code = "import sys, neojax.environment; print('jax' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"

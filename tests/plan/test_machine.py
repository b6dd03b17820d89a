"""Machines and models by name or by file; what cannot be is said with what can."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from neojax.plan.machine import MACHINES, resolve_machine
from neojax.plan.model_sizes import MODELS, resolve_model


def test_a_machine_comes_from_a_file_of_its_fields(tmp_path: Path):
    file = tmp_path / "box.json"
    fields = dataclasses.asdict(MACHINES["h200"]) | {"host_cores": 64}
    del fields["name"]
    file.write_text(json.dumps(fields))
    machine = resolve_machine(str(file))
    assert machine == dataclasses.replace(MACHINES["h200"], name="box", host_cores=64)


def test_unknown_machines_and_fields_are_refused_with_what_there_is(tmp_path: Path):
    with pytest.raises(ValueError, match=r"neither a JSON file nor one of t4.*h200"):
        resolve_machine("b200")
    file = tmp_path / "box.json"
    for text in ("{}", "[", '{"cores": 3}'):
        file.write_text(text)
        with pytest.raises(ValueError, match="Its fields are name, num_devices, device_flops"):
            resolve_machine(str(file))


def test_impossible_machines_are_refused():
    with pytest.raises(ValueError, match="host_cores must be above 0"):
        dataclasses.replace(MACHINES["h200"], host_cores=0)
    with pytest.raises(ValueError, match="2 devices need a device_link"):
        dataclasses.replace(MACHINES["h200"], num_devices=2)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-2-7b", 6.74), ("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.6)]
)
def test_named_models_have_the_sizes_of_their_names(name: str, billions: float):
    assert MODELS[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_any_checkpoint_is_a_model(tiny_checkpoint: Path):
    assert resolve_model(str(tiny_checkpoint)).num_layers == 2
    with pytest.raises(ValueError, match=r"Known by name are llama-2-7b, llama-3\.1-8b"):
        resolve_model("/no/such/model")

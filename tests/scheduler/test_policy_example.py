"""The policy that docs/policies.md shows, as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from neojax.scheduler.policy import load_policy
from neojax.scheduler.request import Placement
from tests.scheduler.test_scheduler import make_request, make_scheduler, run_step, run_to_end

DOCUMENT = Path(__file__).parents[2] / "docs" / "policies.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (code,) = re.findall(r"```python\n# my_policies.py\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "my_policies.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_policies", raising=False)
    return "my_policies:LongToHost"


def test_the_example_does_what_it_says(example: str):
    assert f"--offload-policy {example}" in DOCUMENT.read_text()
    scheduler = make_scheduler(load_policy(example), max_num_batched_tokens=256)
    requests = [make_request(0, 80, 4), make_request(1, 20, 4), make_request(2, 100, 4)]
    for request in requests:
        scheduler.add(request)
    run_step(scheduler)
    assert [r.placement for r in requests] == [Placement.HOST, Placement.DEVICE, Placement.HOST]
    run_to_end(scheduler)
    assert [len(r.output_ids) for r in requests] == [4, 4, 4]

"""The measurement of planning itself: of the load that was asked for, whatever the policy."""

from __future__ import annotations

import pytest

from neojax.plan.overhead import main


def test_planning_is_measured_of_as_many_requests_as_were_asked_for(capsys):
    sizes = ["--num-running=12", "--num-waiting=5", "--output-tokens=10", "--steps=20"]
    policies = ["device-only", "auto", "neo", "full"]
    assert main(["--policies", ",".join((*policies, "rolling")), *sizes]) == 0
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[3:]]
    rows = [(line[0].strip(), int(line[1])) for line in lines[::2]]
    assert rows == [*((name, rows) for name in policies for rows in (0, 8)), ("rolling", 8)]
    for line in lines:
        waiting, device, host, prefill = (int(cell) for cell in line[2:6])
        assert device + host <= 12
        assert (prefill > 10) == (waiting == 5)
        assert all(0 < float(cell) < 1000 for cell in line[6:])


def test_an_unknown_policy_is_named(capsys):
    with pytest.raises(SystemExit, match="fastest"):
        main(["--policies", "fastest"])

"""docs/serving.md and the dashboard say what the server does."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from neojax.serve.protocol import UNSUPPORTED, ChatRequest, CompletionRequest
from tests.serve.running_server import RunningServer, wait_for

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
DASHBOARD = ROOT / "docs" / "grafana.json"
HISTOGRAM_PARTS = re.compile(r"_(bucket|sum|count)$")


def served_series(server: RunningServer) -> set[str]:
    """Names of all series, histograms without their suffix."""
    server.complete("a")
    wait_for(lambda: "num_requests_running" in server.get("/metrics").text, "no statistics")
    lines = server.get("/metrics").text.splitlines()
    names = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    # A counter by label shows itself with its first refusal.
    names.add("neojax:admission_rejections_total")
    return {HISTOGRAM_PARTS.sub("", name) for name in names}


def test_the_dashboard_asks_for_series_that_exist(server: RunningServer):
    text = DASHBOARD.read_text(encoding="utf-8")
    json.loads(text)
    asked = {HISTOGRAM_PARTS.sub("", name) for name in re.findall(r"neojax:\w+", text)}
    assert len(asked) > 10
    assert asked <= served_series(server)


@pytest.mark.skipif(shutil.which("curl") is None, reason="runs the commands of the page")
def test_the_curl_commands_of_the_page_work(server: RunningServer):
    block = PAGE.split("```bash\n")[1].split("```")[0].replace("\\\n", " ")
    commands = [line for line in block.splitlines() if line.startswith("curl ")]
    assert len(commands) == 3
    for command in commands:
        argv = shlex.split(command.replace("http://127.0.0.1:8000", server.url))
        ended = subprocess.run([*argv, "-sf"], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, (command, ended.stdout)
        if "stream" in command:
            assert ended.stdout.endswith("data: [DONE]\n\n")
        else:
            json.loads(ended.stdout)


def test_the_page_names_every_series(server: RunningServer):
    section = PAGE.split("## Metrics")[1].split("## ")[0]
    named = {f"neojax:{name}" for name in re.findall(r"`(\w+)`", section)}
    assert served_series(server) <= named


def test_the_page_names_every_field_that_is_honoured():
    requests = PAGE.split("## Requests")[1].split("## ")[0]
    fields = set(CompletionRequest.model_fields) | set(ChatRequest.model_fields)
    missing = {field for field in fields - {"model", "prompt", "messages"} if field not in requests}
    assert missing == set()
    # What one API has and the other has not is refused there.
    both = set(CompletionRequest.model_fields) & set(ChatRequest.model_fields)
    assert not both - {"logprobs"} & set(UNSUPPORTED)

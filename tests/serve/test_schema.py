"""Requests that schemathesis makes from the server's own OpenAPI document."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.running_server import serving

# Its other checks ask that the schema alone tells what is accepted. It cannot: how many tokens a
# text has, and which ids a model knows, stand in no schema.
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="part of the dev extra"
)
def test_requests_made_from_the_schema_find_no_server_error(tiny_checkpoint: Path, tmp_path: Path):
    # A hundred tokens of context keep each answer short: what is tested is what is refused.
    with serving(tiny_checkpoint, tmp_path, "--max-model-len", "100") as server:
        command = [sys.executable, "-c", "from schemathesis.cli import schemathesis as st; st()"]
        options = ["--max-examples", "150", "--checks", CHECKS, "--request-timeout", "10"]
        ended = subprocess.run(
            [*command, "run", server.url + "/openapi.json", *options, "--seed", "1"],
            capture_output=True,
            text=True,
            timeout=500,
            cwd=tmp_path,
        )
        assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr
        generated, passed = re.findall(r"(\d+) generated, (\d+) passed", ended.stdout)[-1]
        assert generated == passed
        assert int(passed) > 1000
        assert server.is_alive()
        assert "Traceback" not in server.stderr

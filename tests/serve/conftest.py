"""A server shared by the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.serve.running_server import RunningServer, serving


@pytest.fixture(scope="session")
def shared_server(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """One server for the whole session."""
    directory = tmp_path_factory.mktemp("serve")
    with serving(tiny_checkpoint, directory, "--max-model-len", "512") as running:
        yield running


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server, which must be alive after the test."""
    yield shared_server
    assert shared_server.is_alive()


@pytest.fixture(scope="session")
def _shared_client(shared_server: RunningServer) -> Iterator[openai.OpenAI]:
    url = f"{shared_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(server: RunningServer, _shared_client: openai.OpenAI) -> openai.OpenAI:
    """OpenAI's own client."""
    return _shared_client

"""`python -m neojax.bench serve`: any OpenAI server under load, seen from its client."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path

from neojax.bench.client import Target, send_traffic
from neojax.bench.load import LoadConfig
from neojax.bench.metrics import Summary, summarise
from neojax.bench.report import SUMMARY_HEADER, latency_table, summary_cells, table
from neojax.cli import parse

PROG = "python -m neojax.bench serve"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeBenchConfig(LoadConfig):
    """The server and the load."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """The server's API, with its /v1."""
    api_key: str | None = None
    """Bearer token. Default: OPENAI_API_KEY, or none."""
    model: str | None = None
    """Model to ask for. Default: the first of /v1/models."""
    arrivals: str = "closed:4"
    """How requests arrive: all, closed:CLIENTS, poisson:RATE, gamma:RATE:CV, steady:CLIENTS,
    trace:FILE."""
    seed: int = 0
    """Seed of lengths, arrivals and prompts."""
    max_token_id: int = 999
    """Prompts are random token ids from 0 to this; it must lie within the server's vocabulary."""
    timeout_s: float = 600.0
    """Seconds after which a request counts as failed."""
    extra_body: str = "{}"
    """JSON object of further fields of each request, such as {"kv_placement": "host"}."""


def main(argv: list[str]) -> int:
    """Run the benchmark; 1 when requests failed."""
    config = parse(argv, ServeBenchConfig, prog=PROG, positional=None)
    try:
        import openai
    except ImportError:
        sys.exit(f"{PROG}: error: it needs the openai package: pip install 'neojax[bench]'")
    try:
        traffic = config.traffic(config.arrivals, config.seed)
        extra = json.loads(config.extra_body)
        if not isinstance(extra, dict):
            raise ValueError(f"--extra-body must be a JSON object, got {config.extra_body}")
    except ValueError as error:
        sys.exit(f"{PROG}: error: {error}")
    target = Target(
        base_url=config.base_url,
        api_key=config.api_key or os.environ.get("OPENAI_API_KEY") or "none",
        model=config.model,
        max_token_id=config.max_token_id,
        timeout_s=config.timeout_s,
        extra_body=extra,
    )
    try:
        run = asyncio.run(send_traffic(target, traffic, seed=config.seed, progress=traffic.name))
    except openai.OpenAIError as error:
        sys.exit(f"{PROG}: error: {config.base_url} does not serve: {error}")
    errors = [record.error for record in run.records if record.error is not None]
    for message in sorted(set(errors)):
        print(f"{errors.count(message)} requests failed: {message}", file=sys.stderr)
    try:
        summary = summarise(run.records, start_s=run.start_s, warm_up=config.warm_up)
    except ValueError as error:
        sys.exit(f"{PROG}: error: {error}")
    print(f"{config.base_url}, {traffic.name}, {summary.num_requests} requests\n")
    # Where KV lies is not for a client to see.
    print(table(("", *SUMMARY_HEADER), [["", *summary_cells(summary)]]) + "\n")
    print(latency_table(summary))
    if config.output is not None:
        _write(config.output, argv, summary)
    return 1 if errors else 0


def _write(path: str, argv: list[str], summary: Summary) -> None:
    command = ["python", "-m", "neojax.bench", "serve", *argv]
    report = {"command": command, "summary": dataclasses.asdict(summary)}
    Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

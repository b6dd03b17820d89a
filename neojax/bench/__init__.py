"""Benchmarks: `python -m neojax.bench kernel`, `throughput`, `serve` and `sweep`."""

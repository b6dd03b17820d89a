"""Benchmarks: `python -m neojax.bench kernel` and `throughput`."""

"""Executes plans: compiled stages, shape buckets, the two-lane loop, sampling, warm-up."""

"""Decides what each step runs, from numbers alone: no jax, no arrays, no time of its own."""

"""What host rows are worth: the time that the device alone would need for the same tokens."""

from __future__ import annotations

from neojax.scheduler.plan import Mode
from neojax.scheduler.prediction import Load, Predictor


def decode_token_s(
    predictor: Predictor, num_decodes: int, mean_context: float, num_device_rows: int
) -> float:
    """Seconds that a decoded token costs the device alone, as full as its pool lets it be.

    num_decodes: those of the step; num_device_rows: what the pool holds.
    """
    rows = max(1, num_decodes, num_device_rows)
    load = Load(num_decodes=rows, decode_context=int(rows * mean_context))
    return predictor.seconds(Mode.DEVICE_ONLY, load) / rows


def prompt_token_s(predictor: Predictor, num_rows: float) -> float:
    """Seconds that one more token of a prompt costs the device in steps of so many rows, its
    attention aside, where steps of the sizes between which it lies alternate.
    """
    linear = predictor.tables.linear[Mode.DEVICE_ONLY]
    sizes = predictor.even_rows
    if len(sizes) < 2:
        return 0.0  # a table of one point says nothing of a row more
    above = next((i for i, size in enumerate(sizes) if size >= num_rows), len(sizes) - 1)
    low, high = sizes[max(0, above - 1)], sizes[max(1, above)]
    price = (linear(high) - linear(low)) / (high - low)
    return predictor.tables.num_layers * price * predictor.corrections.step[Mode.DEVICE_ONLY]


def device_only_s(
    predictor: Predictor, device: Load, num_host_rows: float, token_s: float
) -> float:
    """Seconds of the device work in DEVICE_ONLY mode, and of the host rows' tokens at token_s.

    Prompts that go to the host count as if they stayed.
    """
    alone = device._replace(num_host_rows=0, host_context=0, store_tokens=0, fetch_tokens=0)
    seconds = predictor.seconds(Mode.DEVICE_ONLY, alone) if alone.num_rows else 0.0
    return seconds + num_host_rows * token_s

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


def device_only_s(predictor: Predictor, device: Load, num_host_rows: int, token_s: float) -> float:
    """Seconds of the device work in DEVICE_ONLY mode, and of the host rows' tokens at token_s.

    Prompts that go to the host count as if they stayed.
    """
    alone = device._replace(num_host_rows=0, host_context=0, store_tokens=0, fetch_tokens=0)
    seconds = predictor.seconds(Mode.DEVICE_ONLY, alone) if alone.num_rows else 0.0
    return seconds + num_host_rows * token_s

"""How a model's makers sample from it: what a request gets that does not say."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from neojax.sampling_params import SamplingParams

log = logging.getLogger("neojax.serve")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Used where a request leaves the field out; OpenAI's values unless the model has its own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> SamplingDefaults:
        """From generation_config.json, if there is one. Raises ValueError for impossible values."""
        path = checkpoint / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            values = {
                name: found[name]
                for name in ("temperature", "top_p", "top_k")
                if found.get(name) is not None
            }
            defaults = cls(**values)
            SamplingParams(
                temperature=defaults.temperature, top_p=defaults.top_p, top_k=defaults.top_k
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: {error}. Try --generation-config none") from error
        if values:
            shown = ", ".join(f"{name}={value}" for name, value in values.items())
            log.info("defaults of the model: %s (--generation-config none turns them off)", shown)
        return defaults

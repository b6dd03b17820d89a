"""How a model's makers sample from it: what a request gets that does not say."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

from neojax.sampling_params import SamplingParams

log = logging.getLogger("neojax.serve")


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Used where a request leaves the field out; OpenAI's values unless the model has its own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

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
                for name in (field.name for field in dataclasses.fields(cls))
                if found.get(name) is not None
            }
            defaults = cls(**values)
            SamplingParams(**dataclasses.asdict(defaults))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: {error}. Try --generation-config none") from error
        if values:
            shown = ", ".join(f"{name}={value}" for name, value in values.items())
            log.info("defaults of the model: %s (--generation-config none turns them off)", shown)
        return defaults

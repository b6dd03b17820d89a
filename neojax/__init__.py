"""neojax: LLM serving with the KV cache split between device and host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neojax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from neojax.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # jax is imported only when the offline API is asked for: the HTTP process never does.
    if name == "LLM":
        from neojax.llm import LLM

        return LLM
    raise AttributeError(f"module 'neojax' has no attribute {name!r}")

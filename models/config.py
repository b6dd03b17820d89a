"""What a Llama is made of: the sizes and constants that a checkpoint's metadata gives. No jax."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from neojax.models.rope_scaling import (
    Llama3RopeScaling,
    LongRopeScaling,
    PerFrequencyRopeScaling,
    RopeScaling,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of one decoder. Hashable: it is part of what the compiled programs are keyed by.

    Raises ValueError when the numbers do not fit together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    """Longest context the weights were made for, in tokens."""
    tie_embeddings: bool = False
    """The output projection is the embedding itself."""
    qkv_bias: bool = False
    """The query, key and value projections have a bias (Qwen2)."""
    qk_norm: bool = False
    """Each query and key head is normalised before it is rotated (Qwen3)."""
    sliding_window: int | None = None
    """Tokens that every layer looks back, its own included (Mistral, Phi-3); None: all."""
    fused_projections: bool = False
    """The checkpoint holds q, k, v as one tensor, and gate and up as another (Phi-3)."""
    name: str = "model"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "int | None") and value is not None and value < 1:
                raise ValueError(f"{self.name}: {field.name} must be above 0, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.name}: num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"{self.name}: rope needs an even head_dim, got {self.head_dim}")
        match self.rope_scaling:
            case PerFrequencyRopeScaling(factors):
                self._check_num_factors(factors)
            case LongRopeScaling(short, long):
                self._check_num_factors(short)
                self._check_num_factors(long)
            case Llama3RopeScaling(_, low, high, _) if low >= high:
                raise ValueError(
                    f"{self.name}: llama3 rope needs low_freq_factor < high_freq_factor, "
                    f"got {low} and {high}"
                )

    def _check_num_factors(self, factors: tuple[float, ...]) -> None:
        if len(factors) != self.head_dim // 2:
            raise ValueError(
                f"{self.name}: {len(factors)} rope factors for head_dim {self.head_dim}, "
                f"which has {self.head_dim // 2} frequencies"
            )

    @property
    def q_size(self) -> int:
        """Width of all query heads, N*H."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (or value heads), K*H."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights in the model; a tied embedding counts once."""
        d, f = self.hidden_size, self.intermediate_size
        block = d * (2 * self.q_size + 2 * self.kv_size + 3 * f + 2)
        block += self.qkv_bias * (self.q_size + 2 * self.kv_size) + self.qk_norm * 2 * self.head_dim
        return self.num_layers * block + d * (self.vocab_size * (2 - self.tie_embeddings) + 1)

    def limited_to(self, max_model_len: int | None) -> ModelConfig:
        """The same model for contexts of at most `max_model_len` tokens (None: its own), which
        decides between the factors of a LongRopeScaling."""
        if max_model_len is None or max_model_len >= self.max_position_embeddings:
            return self
        return dataclasses.replace(self, max_position_embeddings=max_model_len)

    @classmethod
    def from_checkpoint(cls, path: Path) -> ModelConfig:
        """Read config.json of a directory, or a GGUF file's metadata.

        Raises ValueError naming what is missing or not supported.
        """
        path = Path(path)
        if path.is_file() and path.suffix == ".gguf":
            from neojax.models import gguf_config

            return gguf_config.read_config(path)
        from neojax.models import hf_config

        return hf_config.read_config(path)

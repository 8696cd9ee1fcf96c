"""The TOML section [model] with sizes of the model.

No `from __future__ import annotations` here: TorchTitan recognizes sections by `is_dataclass(field.type)`.
"""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torchtitan_scape.core.options import Options
from torchtitan_scape.titan.config import Model as TitanModel

CUSTOM = "custom"  # the flavor without sizes of its own
# Far beyond any model that is trained; a larger value is a typing error, and would overflow or take minutes to build.
_LARGEST = {"n_layers": 10_000, "rope_theta": 1e12}
_LARGEST_SIZE = 2**24


@dataclass
class ModelSizes(Options):
    """[model.sizes]: sizes that override those of the flavor. Keys that are 0 keep the flavor's value. The flavor
    "custom" has no sizes of its own: it needs dim, n_layers, n_heads and vocab_size.
    """

    section: ClassVar[str] = "model.sizes"

    dim: int = 0
    """Width of the model"""

    n_layers: int = 0
    """Number of layers"""

    n_heads: int = 0
    """Attention heads, a divisor of dim"""

    n_kv_heads: int = 0
    """Heads of keys and values, a divisor of n_heads; by default of "custom" n_heads. Not for gpt2"""

    ffn_dim: int = 0
    """Width of the feed-forward layer. If it is 0, it follows from dim: for llama3 by TorchTitan's rule with the
    flavor's factors (8/3 of dim, rounded up to a multiple of 256, for "custom"), for gpt2 it is 4 times dim, always"""

    vocab_size: int = 0
    """Rows of the token embedding: at least the entries of the tokenizer"""

    positions: int = 0
    """Rows of the position embedding of gpt2 (1024 for "custom"), the maximum of seq_len. Not for llama3"""

    rope_theta: float = 0.0
    """Base of the rotary positions of llama3 (10000 for "custom"). Not for gpt2"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in fields(self):
            most = _LARGEST.get(key.name, _LARGEST_SIZE)
            rule = f"it must be positive and at most {most:.12g}, or 0 for the flavor's value"
            self.require(0 <= getattr(self, key.name) <= most, key.name, rule)

    def given(self) -> dict[str, Any]:
        """Return the sizes that are set, by key."""
        return {key.name: value for key in fields(self) if (value := getattr(self, key.name))}


@dataclass
class Model(TitanModel):
    """[model]: model, its size and its tokenizer. TorchTitan's keys, and `sizes`."""

    sizes: ModelSizes = field(default_factory=ModelSizes)

    @property
    def title(self) -> str:
        """Name, flavor and sizes, which identify the model in checkpoints, logs and messages."""
        given = ", ".join(f"{key} {value:.12g}" for key, value in self.sizes.given().items())
        return f"{self.name} {self.flavor}" + (f" ({given})" if given else "")

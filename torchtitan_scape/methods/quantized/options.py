"""Options and cost of gradients in 4-bit and 8-bit block codes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from topology.calls import CollectiveCall
from topology.ring_bytes import LevelSize
from torchtitan_scape.core.options import LAYOUT
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.cost import GradientCost, all_reduce_stream
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.wire import encoded_bytes, encoded_size


@dataclass
class QuantizedOptions(MethodOptions):
    """[sync.quantized]: gradients in a code of 4 or 8 bits."""

    section: ClassVar[str] = "sync.quantized"
    main_options = ("code",)

    code: Literal["int8", "int4", "e2m1", "e3m0"] = "e2m1"
    """Encoding of the gradients on the outermost level, in both directions, with one BF16 scale per block: 8-bit or
    4-bit integers, or 4-bit floats with a mantissa of one bit or none"""

    block: int = 128
    """Entries that share a scale, a power of two from 32 to 1024; every parameter starts a new block"""

    error_feedback: bool = field(default=True, metadata=LAYOUT)
    """Keep the quantization error (FP32, 4 bytes per parameter) and add it to the next gradient; otherwise drop it"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.block in (32, 64, 128, 256, 512, 1024), "block", "it must be a power of two from 32 to 1024")

    def needs_comm_streams(self) -> bool:
        return True

    def label(self) -> str:
        return f"{self.method_name()} {self.code}"

    def cost(self) -> "QuantizedCost":
        return QuantizedCost(self)


@dataclass(frozen=True)
class QuantizedCost(GradientCost):
    """All gradients in a block code, in chunks."""

    options: QuantizedOptions
    supports_overlap = True

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = 0
    ) -> list[CollectiveCall]:
        block = self.options.block
        return [all_reduce_stream(model.sizes, levels, chunk_entries, block, encoded_size(self.options.code, block))]

    def traffic_per_parameter(self) -> float:
        """Return the bytes per parameter of the kernels on one level.

        4 to read the gradient, 4 to write the result, and four messages written or read; with error feedback 16 more to
        read gradient and residual again and write the residual. The share of an owner, 8 / N, is neglected.
        """
        messages = 4.0 * encoded_bytes(self.options.code, self.options.block)
        return messages + (24.0 if self.options.error_feedback else 8.0)

    @property
    def chunk_bytes(self) -> float:
        """Values, the sent and the received message, and the quantization error."""
        coded = 2.0 * encoded_bytes(self.options.code, self.options.block)
        return 4.0 + coded + (4.0 if self.options.error_feedback else 0.0)

    def residual_entries(self, model: LocalModel) -> int:
        return model.entries if self.options.error_feedback else 0

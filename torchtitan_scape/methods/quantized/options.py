"""Options of gradients in block codes of 1 to 8 bits."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torchtitan_scape.core.options import LAYOUT
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.kernels.codec.formats import FORMATS, encoded_size
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.traffic import CollectiveCall, Levels, all_reduce_stream

Code = Literal["int8", "int4", "e2m1", "e3m0", "2bit", "1bit"]


@dataclass
class QuantizedOptions(MethodOptions):
    """[sync.quantized]: gradients in a code of 1 to 8 bits."""

    section: ClassVar[str] = "sync.quantized"
    main_options = ("code",)

    code: Code = "e2m1"
    """Encoding of the gradients on the outermost level, in both directions, with BF16 scales per block: 8-bit or 4-bit
    integers, 4-bit floats with a mantissa of one bit or none, or signs and one or two mean magnitudes"""

    block: int = 128
    """Entries that share a scale, a power of two from 32 to 1024; every parameter starts a new block"""

    error_feedback: bool = field(default=True, metadata=LAYOUT)
    """Keep the quantization error (FP32, 4 bytes per parameter) and add it to the next gradient; otherwise drop it"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.block in (32, 64, 128, 256, 512, 1024), "block", "it must be a power of two from 32 to 1024")

    @property
    def fills_blocks(self) -> bool:
        """Return whether the scale is a mean magnitude, so that a short block is filled with its own entries."""
        return FORMATS[self.code].largest is None

    def keeps_owner_error(self, replicas: int) -> bool:
        """Return whether an owner stores the quantization error of its mean as a separate state.

        With few bits N times that error is so large that it would determine the scales of the owner's own message.
        """
        return self.error_feedback and self.fills_blocks and replicas > 1

    def needs_comm_streams(self) -> bool:
        return True

    def supports_overlap(self) -> bool:
        return True

    def collective_calls(self, model: LocalModel, levels: Levels, chunk_entries: int = 0) -> list[CollectiveCall]:
        encoded = encoded_size(self.code, self.block)
        return [all_reduce_stream(model.sizes, levels, chunk_entries, self.block, encoded, in_place=True)]

    def held_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        kinds = {"residual": 4.0 * model.entries} if self.error_feedback else {}
        if self.keeps_owner_error(replicas):
            kinds["owner_error"] = 4.0 * model.entries
        return kinds

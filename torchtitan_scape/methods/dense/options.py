"""Options of dense FP32 gradients, the baseline."""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan_scape.methods.options import MethodOptions


@dataclass
class DenseOptions(MethodOptions):
    """[sync.dense]: gradients in FP32, uncompressed (the baseline). It has no options."""

    section: ClassVar[str] = "sync.dense"

    def supports_overlap(self) -> bool:
        return True

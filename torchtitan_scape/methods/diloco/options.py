"""Options and cost of DiLoCo."""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan_scape.methods.local_options import Code, LocalOptions, whole_displacements
from torchtitan_scape.methods.options import MethodOptions


@dataclass
class DilocoOptions(LocalOptions):
    """[sync.diloco]: local steps, then an average of displacements."""

    section: ClassVar[str] = "sync.diloco"
    main_options = ("inner_steps", "code")

    code: Code = "float32"
    """Encoding of the displacements: FP32, or a code with one scale per block of 128 entries"""

    def averaging(self) -> MethodOptions:
        return whole_displacements(self.code)

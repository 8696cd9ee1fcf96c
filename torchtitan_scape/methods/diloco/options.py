"""Options of DiLoCo."""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan_scape.methods.local_options import WholeOptions


@dataclass
class DilocoOptions(WholeOptions):
    """[sync.diloco]: local steps, then an average of displacements."""

    section: ClassVar[str] = "sync.diloco"
    main_options = ("inner_steps", "code")

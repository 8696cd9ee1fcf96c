"""An option is spelled once: what the sections of a recipe that belong to a method have in common.

A method's options are a dataclass beside it. The dataclass is the TOML section, checks itself, and says by its fields
what replicas must agree on, what a checkpoint records of it, and what decides where state lies.

No `from __future__ import annotations` in a file with a section: TorchTitan tells sections apart by
`is_dataclass(field.type)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from topology.layout import Layout
from torchtitan_scape.core.type_checks import check_section
from torchtitan_scape.planner.volumes import PlannedRun as PlannedMethod

# Of a field, as in `field(default=1024, metadata=LAYOUT)`.
# By it state lies otherwise: with another value it is taken by the rule for another layout.
LAYOUT = {"layout": True}
# It changes how a step is computed, or where, and no number that comes out of it.
FREE = {"free": True}


@dataclass
class Options:
    """A section. Subclasses are dataclasses, name it, and give every field a docstring, which --help shows.

    Raises ValueError for a value of a wrong type; subclasses `require` the rest in `__post_init__`.
    """

    section: ClassVar[str]  # as in the recipe, for example "sync.scape"

    def __post_init__(self) -> None:
        check_section(self, self.section)

    def require(self, holds: bool, name: str, rule: str) -> None:
        """Raises ValueError with the field's value and the rule, for example "it must be 0 or more"."""
        if not holds:
            raise ValueError(f"[{self.section}] {name} = {getattr(self, name)!r}; {rule}")

    def fingerprint(self) -> dict[str, Any]:
        """What replicas agree on and a checkpoint records: plain JSON values by the fields' names."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if not f.metadata.get("free")}

    def layout(self) -> dict[str, Any]:
        """Of these, what decides where state lies."""
        values = self.fingerprint()
        return {f.name: values[f.name] for f in fields(self) if f.metadata.get("layout")}


@dataclass
class MethodOptions(Options):
    """The section of a method of the replicate axis, and what others ask of it before there is an object."""

    def resolve(self, shapes: Sequence[Sequence[int]], replicas: int) -> Self:
        """The options with what they leave to the model chosen; themselves where there is no such thing.

        shapes: of a rank's shards. Raises ValueError where nothing can be chosen.
        """
        return self

    def resolve_for_links(self, shapes: Sequence[Sequence[int]], layout: Layout, rank: int, levels: int) -> Self:
        """Return the options with defaults chosen that depend on the links between replicas.

        Args:
            shapes: of this rank's shards.
            layout: of the run, simulated replicas included.
            rank: this rank.
            levels: levels of the exchange, as communicators were built.
        """
        return self

    def needs_comm_streams(self) -> bool:
        """Whether an exchange over a single ring has several stages, so that it needs lanes."""
        return False

    def simulation_error(self) -> str:
        """Why replicas that one process plays do not go with these options; empty where they do."""
        return ""

    def planned(self, optimizer: str) -> PlannedMethod:
        """What the cost model knows of the method, with this `[optimizer] name`."""
        return PlannedMethod(optimizer.lower())


def _plain(value: Any) -> Any:
    # Lists are sets here: no method asks for an order.
    return sorted(value) if isinstance(value, list | tuple) else value

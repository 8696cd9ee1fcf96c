"""Base of the TOML sections that this project defines.

The dataclass of a section is the only place where its options are declared. It checks its values. The metadata of its
fields marks the options that must be equal on all replicas, those in a checkpoint, and those that determine the layout
of states.

A file that defines a section must not use `from __future__ import annotations`: TorchTitan recognizes sections by
`is_dataclass(field.type)`.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from torchtitan_scape.core.renamed_keys import renamed
from torchtitan_scape.core.type_checks import check_section

# Metadata of a field, as in `field(default=1024, metadata=LAYOUT)`.
# The value determines the layout of states; another value is treated as a change of layout when a checkpoint is loaded.
LAYOUT = {"layout": True}
# The value changes how or where a step is computed, but no result.
FREE = {"free": True}


@dataclass
class Options:
    """A TOML section.

    Subclasses are dataclasses, set `section` and give every field a docstring, which `--help` prints. A wrong type, and
    an attribute with a key of an earlier version, is a ValueError, an argument with such a key a TypeError. Subclasses
    call `require` in `__post_init__` for all other rules.
    """

    section: ClassVar[str]  # as in the recipe, for example "sync.scape"

    def __new__(cls, *_: Any, **given: Any) -> Self:
        # Called before the dataclass's __init__, which raises TypeError for an unknown argument without the new name.
        for key, value in given.items():
            if message := renamed(cls.section, key, value):
                raise TypeError(message)
        return super().__new__(cls)

    def __setattr__(self, key: str, value: Any) -> None:
        if message := renamed(self.section, key, value):
            raise ValueError(message)
        super().__setattr__(key, value)

    def __post_init__(self) -> None:
        check_section(self, self.section)

    def require(self, holds: bool, name: str, rule: str) -> None:
        """Raise ValueError with the field's value and the rule, for example "it must be 0 or more", unless `holds`."""
        if not holds:
            raise ValueError(f"[{self.section}] {name} = {getattr(self, name)!r}; {rule}")

    def fingerprint(self) -> dict[str, Any]:
        """Return the values that replicas must agree on and a checkpoint records: plain JSON values by field name."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if not f.metadata.get("free")}

    def layout(self) -> dict[str, Any]:
        """Return the part of `fingerprint` that determines the layout of states."""
        values = self.fingerprint()
        return {f.name: values[f.name] for f in fields(self) if f.metadata.get("layout")}


def _plain(value: Any) -> Any:
    # The order of a list has no meaning in any section.
    return sorted(value) if isinstance(value, list | tuple) else value

"""Records that ranks and launchers exchange as JSON through the store, where any program that reaches the port can
write.
"""

import json
from dataclasses import asdict, fields
from typing import Any, TypeVar

from torchtitan_scape.core.files import parse_json

_Record = TypeVar("_Record")


def to_json(record: Any) -> str:
    """Return the JSON text of a dataclass whose fields are numbers, strings and flags."""
    return json.dumps(asdict(record))


def from_json(kind: type[_Record], value: bytes) -> _Record:
    """Return the dataclass `kind` from the JSON text of `to_json`.

    Raises:
        ValueError: The value is something else; the message shows its beginning.
    """
    try:
        given = parse_json(value)
        expected: dict[str, Any] = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
        if type(given) is dict and {name: type(one) for name, one in given.items()} == expected:
            return kind(**given)
    except ValueError:  # Not JSON, or refused by the record.
        pass
    raise ValueError(shown(value))


def shown(value: bytes) -> str:
    """Return the beginning of a value of another program, for a line of the log."""
    return repr(value[:60]) + "..." * (len(value) > 60)

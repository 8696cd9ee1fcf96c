"""The format of a checkpoint's record, and the names of earlier formats."""

from typing import Any

from torchtitan_scape.core.files import parse_json
from torchtitan_scape.core.renamed_keys import with_present_keys
from torchtitan_scape.methods.registry import METHODS

FORMAT = 3
# Names of format 1, which commit bc06ed0 wrote, and their present names. Formats 1 and 2 also have earlier keys of
# options (`core.renamed_keys`).
ALIASES: dict[str, dict[str, str]] = {
    # Kinds of state: they are the first part of tensor names.
    "kinds": {"owed": "owner_error", "own_parameters": "replica_weights"},
    # Keys of the description of each kind.
    "description": {"carries": "on_migration", "own": "per_replica", "lies": "row_layout"},
}
# Types of values that every record has.
_TYPES: dict[str, type] = {"method": str, "optimizer": str, "residual": str, "replicas": int, "shard": int}
_TYPES |= {"states": dict, "counters": dict}
_FORMAT_1_KINDS = {present: earlier for earlier, present in ALIASES["kinds"].items()}


class _Record(dict[str, Any]):
    """A record whose missing keys raise ValueError with the checkpoint's path."""

    def __init__(self, values: dict[str, Any], path: str) -> None:
        super().__init__({k: _Record(v, path) if isinstance(v, dict) else v for k, v in values.items()})
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise damaged(self._path, f"it has no {key!r}")


def damaged(path: str, reason: str) -> ValueError:
    """Return the error for a record of the checkpoint `path` that cannot be interpreted."""
    return ValueError(f"{path}: the record of the run, run_metadata.json, is damaged: {reason}")


def parse_record(content: Any, path: str) -> dict[str, Any]:
    """Return the record in JSON text under the present names, see `to_present_format`.

    Raises:
        ValueError: the record is damaged, or of a later format. Missing keys raise it when they are read.
    """
    try:
        found = parse_json(content)
    except (ValueError, TypeError) as error:
        raise damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise damaged(path, f"it is {found!r:.100}")
    try:
        saved = _Record(to_present_format(_Record(found, path), path), path)
    except (TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from None
    for key, kind in _TYPES.items():
        if type(saved[key]) is not (_Record if kind is dict else kind) or (kind is int and saved[key] < 1):
            raise damaged(path, f"{key!r} is {saved[key]!r:.100}")
    for table, kind in (("states", _Record), ("counters", int)):
        for key, value in saved[table].items():
            if type(value) is not kind:
                raise damaged(path, f"{key!r} of {table!r} is {value!r:.100}")
    if type(saved.get("code")) not in (str, type(None)):
        raise damaged(path, f"'code' is {saved['code']!r:.100}")
    if saved["method"] not in METHODS:
        raise damaged(path, f"there is no method {saved['method']!r:.100}")
    return saved


def to_present_format(saved: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a checkpoint's record under the present names; its "format" stays that of the files.

    Args:
        saved: as it was read; a record without "format" is of format 1.
        path: of the checkpoint, for the message.

    Raises:
        ValueError: the format is a later one.
    """
    version = saved.get("format", 1)
    if version not in range(1, FORMAT + 1):
        raise ValueError(
            f"{path} has format {version!r}, and this version reads formats 1 to {FORMAT}; resume with the version "
            "that saved it, or start from its model alone (--checkpoint.initial_load_path of the trainer)"
        )
    if version == FORMAT:
        return saved
    record = with_present_keys(saved, f"sync.{saved['method']}") | {"format": version}
    if "sharding" in record:
        record["sharding"] = with_present_keys(record["sharding"], "sharding")
    if version == 1 and "states" in record:
        record["states"] = {ALIASES["kinds"].get(k, k): _renamed(what) for k, what in record["states"].items()}
    return record


def stored_kind(kind: str, saved: dict[str, Any]) -> str:
    """Return the name of a kind of state in the files of a checkpoint with this record."""
    return _FORMAT_1_KINDS.get(kind, kind) if saved["format"] == 1 else kind


def _renamed(description: dict[str, Any]) -> dict[str, Any]:
    return {ALIASES["description"].get(key, key): value for key, value in description.items()}

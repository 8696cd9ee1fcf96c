"""The format of a checkpoint's record, and the names of earlier formats."""

from typing import Any

from torchtitan_scape.core.renamed_keys import with_present_keys

FORMAT = 3
# Names of format 1, which commit bc06ed0 wrote, and their present names. Formats 1 and 2 also have earlier keys of
# options (`core.renamed_keys`).
ALIASES: dict[str, dict[str, str]] = {
    # Kinds of state: they are the first part of tensor names.
    "kinds": {"owed": "owner_error", "own_parameters": "replica_weights"},
    # Keys of the description of each kind.
    "description": {"carries": "on_migration", "own": "per_replica", "lies": "row_layout"},
}
_FORMAT_1_KINDS = {present: earlier for earlier, present in ALIASES["kinds"].items()}


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

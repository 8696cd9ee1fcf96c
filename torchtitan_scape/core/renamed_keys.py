"""Keys of TOML sections that had another name in earlier versions.

Recipes, command lines and own training loops with an earlier key are refused, and the message contains the present one.
Records of earlier runs, in checkpoints and results, are read with the present keys.
"""

import json
from typing import Any

from torchtitan_scape.core.type_checks import short

# Section -> earlier key -> present key.
RENAMED_KEYS: dict[str, dict[str, str]] = {
    "sync.scape": {
        "wire": "code",
        "values": "update_code",
        "wire_dtype": "code",
        "values_dtype": "update_code",
        "wait_scaling": "staleness_scaling",
        "max_wait": "max_staleness",
    },
    "sync.topk": {"values": "code"},
    "sync.sparseloco": {"values": "code"},
    "sync.demo": {"values": "code"},
    "sharding": {"weights": "weights_code", "gradients": "gradients_code"},
    "sharding.levels": {"sum": "sum_code", "update": "update_code"},
    "sharding.tagc": {"codec": "code", "index": "index_code"},
}
# Earlier keys without a present one with the same values, and the advice for each.
REMOVED_KEYS = {
    "sync.scape.parameters": 'it is now update: "local" is called "replicated", and "gather" "sharded"',
    "sync.scape.flush_at_end": "it is now flush_at_end under [sync]",
    "sync.scape.wait_by": 'it was removed, delete it: the former default "row_column" is now the only rule',
    "sharding.weights_block": "it was removed, delete it: blocks of weights have 256 entries",
    "sharding.gradients_block": "it was removed, delete it: blocks of gradients have 128 entries",
    "sharding.hadamard": 'it was removed, delete it: gradients_code "int4" and "int8+int4" use the transform',
    "sharding.hops": "it was removed, delete it: the layout determines the hops, and with [sharding.levels] the number "
    "of codes in gradients_code",
}


def present_key(key: str) -> str:
    """Return the present form of a key with its section, for example "sync.scape.code" for "sync.scape.wire"."""
    section, _, name = key.rpartition(".")
    return f"{section}.{RENAMED_KEYS[section][name]}" if name in RENAMED_KEYS.get(section, {}) else key


def with_present_keys(values: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Return the recorded values of a section with present keys.

    Args:
        values: by key, nested sections as dictionaries; by "section.key" if `section` is empty.
    """
    found, prefix = {}, f"{section}." if section else ""
    for key, value in values.items():
        nested = with_present_keys(value, prefix + key) if isinstance(value, dict) else value
        found[present_key(prefix + key).removeprefix(prefix)] = nested
    return found


def renamed(section: str, key: str, value: Any) -> str:
    """Return the message that refuses an earlier key; "" for any other key."""
    if advice := REMOVED_KEYS.get(f"{section}.{key}"):
        return f"[{section}] {key} = {short(value)}: {advice}"
    name = RENAMED_KEYS.get(section, {}).get(key, "")
    shown = json.dumps(value)[:200] if isinstance(value, str | bool) else short(value)
    return name and f"[{section}] {key} is now {name}: set {name} = {shown}"

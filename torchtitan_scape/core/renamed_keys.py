"""Keys of TOML sections that had another name in earlier versions, or that were removed.

Recipes, command lines and own training loops with an earlier key are refused, and the message contains the present one
or advice. Records of earlier runs, in checkpoints and results, are read with the present keys.
"""

import json
from typing import Any

from torchtitan_scape.core.type_checks import short

# Section -> earlier key -> present key.
RENAMED_KEYS: dict[str, dict[str, str]] = {
    "sync.scape": {
        "wire": "code",
        "wire_dtype": "code",
        "wait_scaling": "staleness_scaling",
    },
    "sync.topk": {"values": "code"},
    "sync.sparseloco": {"values": "code"},
    "sync.demo": {"values": "code"},
    "sharding": {"weights": "weights_code", "gradients": "gradients_code"},
    "sharding.levels": {"sum": "sum_code", "update": "update_code"},
}
_UPDATE_CODE = 'new values have the dtype of the weights: delete it, or set weights_dtype = "bfloat16"'
_SAMPLE = "it was removed, delete it: transformers generates text with a model that torchtitan_scape.export wrote"
_DENSE_NAMES = ("topk.dense_names", "tagc.dense_names", "radius.dense_names")
# Values that were the defaults of removed keys of [sharding.tagc], by present or earlier name.
_TAGC: dict[str, Any] = {
    **dict.fromkeys(("code", "codec"), "packed"),
    **dict.fromkeys(("index_code", "index"), "auto"),
    **{"ratio": 10.0, "left_over": "keep", "fill": True, "micro": "last", "selection": "block", "reproduce": False},
}
# Earlier keys and sections without a present one with the same values, and the advice for each.
REMOVED_KEYS: dict[str, str] = {
    "sync.scape.parameters": 'it is now update: "local" is called "replicated", and "gather" "sharded"',
    "sync.scape.flush_at_end": "it is now flush_at_end under [sync]",
    "sync.scape.wait_by": 'it was removed, delete it: the former default "row_column" is now the only rule',
    "sync.scape.dense_names": "it was removed, delete it: every matrix has a mask",
    "sync.scape.max_staleness": "it was removed, delete it: the limit is always 1000",
    "sync.scape.max_wait": "it was removed, delete it: the limit is always 1000",
    "sync.scape.keep_moment": "it was removed, delete it: with staleness_scaling the factor is always 0.5",
    **{f"sync.scape.{key}": _UPDATE_CODE for key in ("update_code", "values", "values_dtype")},
    "sync.onebit_adam.variance_updates": "it was removed, delete it: every step of the warm-up updates the variance",
    **{f"sync.{key}": "it was removed, delete it: every matrix is compressed" for key in _DENSE_NAMES},
    "sync.powersgd.warm_start": "it was removed, delete it: every step starts from the previous factor",
    "sync.radius.selection": "it was removed, delete it: the largest updates of every tensor are selected",
    "sync.radius.clip_refresh": 'it was removed, delete it: "literal", the rule of the paper, is the only one',
    "sync.radius.release_scale": "it was removed, delete it: as in the paper, the factor is always 1",
    "sync.sparta.orthogonalize": "it was removed, delete it: with more than 4 replicas, quantized_update with Muon has "
    "the lower loss",
    "sync.quantized.whiten_every": "it was removed, delete it: quantized_update with Muon encodes its matrices in such "
    "bases",
    "sharding.weights_block": "it was removed, delete it: blocks of weights have 256 entries",
    "sharding.gradients_block": "it was removed, delete it: blocks of gradients have 128 entries",
    "sharding.rounding": "it was removed, delete it: gradients are rounded to nearest",
    "sharding.hadamard": 'it was removed, delete it: gradients_code "int4" and "int8+int4" use the transform',
    **dict.fromkeys(("sample", "sample.characters"), _SAMPLE),
    "validation.patience": "it was removed, delete it: best.json names the step with the lowest loss",
    "data.allow_special_tokens": "it was removed, delete it: text that spells a special token is ordinary text",
    "sharding.hops": "it was removed, delete it: the layout determines the hops",
    **{
        f"sharding.tagc.{key}": "it was removed, delete it: each step sends packed values once, at an exact index"
        for key in _TAGC
    },
}
# Values of removed keys that are now the only ones. A record with such a value is read as one without the key.
_ONLY_VALUES: dict[str, Any] = {
    "sync.scape.dense_names": [],
    "sync.scape.max_staleness": 1000,
    "sync.scape.max_wait": 1000,
    "sync.scape.keep_moment": 0.5,
    "sync.onebit_adam.variance_updates": 0,
    **{f"sync.{key}": [] for key in _DENSE_NAMES},
    "sync.powersgd.warm_start": True,
    "sync.radius.selection": "tensor",
    "sync.radius.clip_refresh": "literal",
    "sync.radius.release_scale": 1.0,
    "sync.sparta.orthogonalize": False,
    "sync.quantized.whiten_every": 0,
    "sharding.weights_block": 256,
    "sharding.gradients_block": 128,
    "sharding.rounding": "nearest",
    "sharding.hadamard": True,
    "sharding.hops": "auto",
    "data.allow_special_tokens": False,
    "sample": {"characters": 0},
    "sample.characters": 0,
    "validation.patience": 0,
    **{f"sharding.tagc.{key}": value for key, value in _TAGC.items()},
}


def present_key(key: str) -> str:
    """Return the present form of a key with its section, for example "sync.scape.code" for "sync.scape.wire"."""
    section, _, name = key.rpartition(".")
    return f"{section}.{RENAMED_KEYS[section][name]}" if name in RENAMED_KEYS.get(section, {}) else key


def with_present_keys(values: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Return the recorded values of a section with present keys, without removed keys of the only present value.

    Args:
        values: by key, nested sections as dictionaries; by "section.key" if `section` is empty.
    """
    present, prefix = {}, f"{section}." if section else ""
    weights, update, former_update = (
        values.get(f"sync.scape.{key}".removeprefix(prefix)) for key in ("weights_dtype", "update", "parameters")
    )
    sends_values = update == "sharded" or former_update == "gather"
    for key, value in values.items():
        if REMOVED_KEYS.get(prefix + key) is _UPDATE_CODE:
            # Values in FP32 are rounded to the weights by the receiver, those in BF16 by the sender.
            is_present = not sends_values or value in ("float32", weights, None)
        else:
            is_present = prefix + key in _ONLY_VALUES and value in (_ONLY_VALUES[prefix + key], None)
        if is_present:
            continue
        nested = with_present_keys(value, prefix + key) if isinstance(value, dict) else value
        present[present_key(prefix + key).removeprefix(prefix)] = nested
    return present


def removed_keys(values: dict[str, Any], section: str) -> set[str]:
    """Return the removed keys of a record, the result of `with_present_keys`, whose value is not the present one."""
    names = {key: f"{section}.{key}" for key in values}
    return {key for key, name in names.items() if name in _ONLY_VALUES or REMOVED_KEYS.get(name) is _UPDATE_CODE}


def renamed(section: str, key: str, value: Any) -> str:
    """Return the message that refuses an earlier key; "" for any other key."""
    if advice := REMOVED_KEYS.get(f"{section}.{key}".removeprefix(".")):
        return f"[{section}] {key} = {short(value)}: {advice}" if section else f"[{key}]: {advice}"
    name = RENAMED_KEYS.get(section, {}).get(key, "")
    shown = json.dumps(value)[:200] if isinstance(value, str | bool) else short(value)
    return name and f"[{section}] {key} is now {name}: set {name} = {shown}"

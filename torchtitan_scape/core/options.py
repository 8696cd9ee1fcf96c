"""Base of the TOML sections that this project defines, checks of their values, and their keys in earlier versions.

The dataclass of a section is the only place where its options are declared. It checks its values against the types of
its fields, which neither TOML nor TorchTitan enforces. The metadata of its fields marks the options that must be equal
on all replicas, those in a checkpoint, and those that determine the layout of states.

Recipes, command lines and own training loops with an earlier key are refused, and the message contains the present one
or advice. Records of earlier runs, in checkpoints and results, are read with the present keys.

A file that defines a section must not use `from __future__ import annotations`: TorchTitan recognizes sections by
`is_dataclass(field.type)`.
"""

import json
import math
import types
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin

# Metadata of a field, as in `field(default=1024, metadata=LAYOUT)`.
# The value determines the layout of states; another value is treated as a change of layout when a checkpoint is loaded.
LAYOUT = {"layout": True}
# The value changes how or where a step is computed, but no result.
FREE = {"free": True}

MAX_INTEGER = 2**63 - 1  # Largest integer in tensors, files and collectives.


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


# ------------------------------------------------------------------------------------------------------ types of values


def check_section(section: Any, name: str) -> None:
    """Check the values of a section and of its subsections. Raises ValueError for a wrong type."""
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(field.type) and is_dataclass(value):
            check_section(value, f"{name}.{field.name}".lstrip("."))
        else:
            check_value(name, field.name, value, field.type)


def check_value(section: str, key: str, value: Any, expected: Any) -> None:
    """Check one value. Raises ValueError with key, value and the expected type."""
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValueError(f"[{section}] {key} = {short(value)}; it is beyond 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"[{section}] {key} = {value}; it must be finite")
    if not _fits(value, expected):
        raise ValueError(f"[{section}] {key} = {short(value)}; it must be {type_text(expected)}")
    if isinstance(value, str) and "\0" in value:
        raise ValueError(f"[{section}] {key} = {short(value)}; it contains a NUL character")


def value_of_text(text: str, expected: Any) -> Any:
    """Return the value of a text on the command line: the first alternative of the type that it fits, or the text."""
    is_union = get_origin(expected) in (Union, types.UnionType)
    alternatives = get_args(expected) if is_union else (expected,)
    if types.NoneType in alternatives and text == "None":
        return None
    for one in alternatives:
        try:
            if one in (int, float):
                return one(text)
            if one == list[str]:
                return text.split(",")
            if get_origin(one) is list:
                return json.loads(text if text.startswith("[") else f"[{text}]")
        except (ValueError, RecursionError):
            continue
        if _fits(text, one):
            break
    return text


def short(value: Any) -> str:
    """Return `repr(value)`, truncated to 200 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not convert integers of thousands of digits.
        return "a very large number"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _fits(value: Any, expected: Any) -> bool:
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(entry, arguments[0]) for entry in value)
    if expected is None or expected is types.NoneType:
        return value is None
    if isinstance(value, bool) or expected is bool:
        return isinstance(value, bool) and expected is bool
    if expected is float:
        return isinstance(value, (int, float))
    # A user's module may use types that TOML does not have.
    return not isinstance(expected, type) or isinstance(value, expected)


def type_text(expected: Any) -> str:
    """Return a type in words, or the allowed values."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(one) for one in arguments if one is not types.NoneType))
    if origin is list:
        return f"a list of {_plural(arguments[0])}"
    names = {int: "an integer", float: "a number", bool: "bool", str: "a string"}
    return names.get(expected, str(expected))


def _plural(expected: Any) -> str:
    if get_origin(expected) is list:
        return f"lists of {_plural(get_args(expected)[0])}"
    return {str: "strings", int: "integers"}[expected]


def check_hyperparameters(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Check the arguments of an optimizer's constructor. Raises ValueError for a value out of range."""
    if lr < 0:
        raise ValueError(f"lr is {lr}; it must be 0 or more")
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} is {beta}; it must lie in [0, 1)")
    if eps < 0 or weight_decay < 0:
        raise ValueError(f"eps is {eps} and weight_decay {weight_decay}; both must be 0 or more")


# --------------------------------------------------------------------------------------------- keys of earlier versions

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

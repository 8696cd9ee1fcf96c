"""Checks of configuration values against the types of their dataclasses, which neither TOML nor TorchTitan enforces."""

import json
import math
import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

MAX_INTEGER = 2**63 - 1  # Largest integer in tensors, files and collectives.


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

"""Attributes of other libraries, and environment variables, replaced inside a `with` block."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside. Raises AttributeError if `owner` has no such attribute."""
    getattr(owner, name)
    before = vars(owner).get(name, _MISSING)  # an attribute of the class is not in the object's own
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables have `values` inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""Recipes: TOML files that extend each other, as one table that knows which file every key is from.

Whoever reads a recipe reads it here, scripts too; neither torch nor TorchTitan is imported for it.
"""

import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unicodedata import category

from torchtitan_scape.sync.types import short

DEEPEST = 4  # files in a row that extend the next
Table = dict[str, Any]


@dataclass
class Recipe:
    """What one or several files say together.

    table: as TOML has it, without `extends`. files: in the order in which they were taken; of a key that several have
    the last one counts. origins: by `section.key`, the file that a value is from.
    """

    table: Table = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)


def load(given: str, check: Callable[[Table], None] = lambda table: None) -> Recipe:
    """Reads the files of `given`, "a.toml,b.toml", in turn, each after those that it extends.

    Tables are merged key by key; a list replaces another. A file that is named twice is taken twice.

    Args:
        given: paths, relative to the working directory; those under `extends` are relative to the file that has them.
        check: of every file's own table; the ValueError that it raises is told with the file.

    Raises:
        ValueError: a file that cannot be read, is no TOML or has a wrong `extends`; files that extend each other in a
            circle, or over more than `DEEPEST` steps. It names the files from `given` on.
    """
    recipe = Recipe()
    for path in split_names(given):
        _take(recipe, (path,), check)
    return recipe


def split_names(given: str) -> list[str]:
    """The paths of "a.toml,b.toml". Raises ValueError where one is empty."""
    paths = given.split(",")
    if not all(path.strip() for path in paths):
        raise ValueError(f"the recipe {given!r} has an empty name in it; write a.toml, or a.toml,b.toml")
    return paths


def flatten(table: Table, prefix: str = "") -> dict[str, Any]:
    """The values of a table and of those in it, by `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _take(recipe: Recipe, chain: tuple[str, ...], check: Callable[[Table], None]) -> None:
    """Adds the last file of the chain, after those that it extends."""
    path, name = chain[-1], _one_line(chain[-1:])
    if os.path.realpath(path) in map(os.path.realpath, chain[:-1]):
        raise ValueError(f"recipes extend each other in a circle: {_one_line(chain)}")
    if len(chain) > DEEPEST + 1:
        raise ValueError(f"recipes extend each other over more than {DEEPEST} steps: {_one_line(chain)}")
    table = _read(chain)
    extended = _extended(name, table.pop("extends", []))
    try:
        check(table)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    for other in extended:
        _take(recipe, (*chain, os.path.join(os.path.dirname(path), other)), check)
    _merge(recipe.table, table)
    recipe.files.append(name)
    recipe.origins |= dict.fromkeys(flatten(table), name)


def _read(chain: tuple[str, ...]) -> Table:
    try:
        return tomllib.loads(Path(chain[-1]).read_bytes().decode())
    except OSError as error:
        raise ValueError(f"the recipe {_one_line(chain)} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML, UTF-8, numbers of too many digits
        raise ValueError(f"the recipe {_one_line(chain)} is no TOML: {' '.join(str(error).split())}") from None


def _extended(name: str, given: Any) -> list[str]:
    paths = [given] if isinstance(given, str) else given
    if not isinstance(paths, list) or not all(isinstance(path, str) and _is_path(path) for path in paths):
        raise ValueError(f"{name}: extends = {short(given)}; it must be the path of a recipe, or a list of paths")
    return paths


def _is_path(text: str) -> bool:
    return bool(text.strip()) and not any(category(character) in ("Cc", "Cs") for character in text)


def _merge(into: Table, table: Table) -> None:
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _one_line(chain: tuple[str, ...]) -> str:
    return " ".join(" -> ".join(chain).split())

"""Recipes: TOML files that extend each other, merged into one table with the origin of every key.

All code reads recipes with this module, including scripts. It imports neither torch nor TorchTitan.
"""

import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unicodedata import category

from torchtitan_scape.core.files import packaged
from torchtitan_scape.core.options import short, with_present_keys

MAX_DEPTH = 4  # of a chain of files that extend each other
# First words of a resolved.toml (see `resolved`), and of its line with the files of the recipe. `load` recognizes the
# files by these, so that the text cannot change.
RESOLVED = "# What the run was started with."
FILES = "# Files, of which a later one wins: "
COMMAND_LINE = "command line"
Table = dict[str, Any]


@dataclass
class Recipe:
    """The merged content of one or several files, in this order; the last file with a key determines its value.

    Attributes:
        origins: by `section.key`, the file of the value.
    """

    table: Table = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)


def load(given: str, check: Callable[[Table], None] = lambda table: None) -> Recipe:
    """Read the files of `given`, for example "a.toml,b.toml", in order, each after the files that it extends.

    Tables are merged key by key; a list replaces an earlier one. A file that is named twice is merged twice. Paths are
    relative to the working directory, see `packaged`; those in `extends` are relative to their file, or name a recipe
    of this package. `check` is called with the table of every file. Errors name the chain of files.
    """
    recipe = Recipe()
    for path in split_names(given):
        _add(recipe, (packaged(path),), check)
    return recipe


def split_names(given: str) -> list[str]:
    """Return the paths of a comma-separated list. Raises ValueError for an empty one."""
    paths = [path.strip() for path in given.split(",")]
    if not all(paths):
        raise ValueError(f"the recipe {given!r} contains an empty name; write a.toml, or a.toml,b.toml")
    return paths


def flatten(table: Table, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _add(recipe: Recipe, chain: tuple[str, ...], check: Callable[[Table], None]) -> None:
    """Merge the last file of the chain into the recipe, after the files that it extends."""
    path, name = chain[-1], _one_line(chain[-1:])
    if os.path.realpath(path) in map(os.path.realpath, chain[:-1]):
        raise ValueError(f"recipes extend each other in a cycle: {_one_line(chain)}")
    if len(chain) > MAX_DEPTH + 1:
        raise ValueError(f"recipes extend each other in a chain of more than {MAX_DEPTH}: {_one_line(chain)}")
    text, table = _read(chain)
    if text.startswith(RESOLVED):  # written by a run, perhaps of an earlier version
        table = with_present_keys(table)
    extended = _extended(name, table.pop("extends", []))
    try:
        check(table)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    for other in extended:
        beside = os.path.join(os.path.dirname(path), other)
        _add(recipe, (*chain, beside if os.path.exists(beside) else packaged(other)), check)
    _merge(recipe.table, table)
    before = _recorded_files(text) if text.startswith(RESOLVED) else []
    recipe.files += [file for file in before if file not in recipe.files]
    recipe.files += [] if name in before else [name]
    recipe.origins |= dict.fromkeys(flatten(table), name)


def _recorded_files(text: str) -> list[str]:
    """Return the files of the recipe that a resolved.toml records."""
    recorded = next((line for line in text.split("\n") if line.startswith(FILES)), FILES)
    return [file for file in recorded.removeprefix(FILES).split(", ") if file not in ("", "none")]


def _read(chain: tuple[str, ...]) -> tuple[str, Table]:
    try:
        text = Path(chain[-1]).read_text(encoding="utf-8-sig")
        return text, tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"the recipe {_one_line(chain)} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, numbers of too many digits, deep nesting
        raise ValueError(f"the recipe {_one_line(chain)} is not valid TOML: {' '.join(str(error).split())}") from None


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

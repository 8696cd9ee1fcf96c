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

from torchtitan_scape.core.type_checks import short

DEEPEST = 4  # files in a row that extend the next
# How a resolved.toml begins (see `resolved`), and what precedes the files that it was made of.
RESOLVED = "# What the run was started with."
FILES = "# Files, of which a later one wins: "
COMMAND_LINE, EARLIER = "command line", "an earlier command line"
Table = dict[str, Any]


@dataclass
class Recipe:
    """What one or several files say together.

    table: as TOML has it, without `extends`. files: in the order in which they were taken; of a key that several have
    the last one counts. origins: by `section.key`, the file that a value is from; of what a resolved.toml says, the
    file that it names. unsaid: the keys that it names none for.
    """

    table: Table = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    unsaid: set[str] = field(default_factory=set)


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
    paths = [path.strip() for path in given.split(",")]
    if not all(paths):
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
    text, table = _read(chain)
    extended = _extended(name, table.pop("extends", []))
    try:
        check(table)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    for other in extended:
        _take(recipe, (*chain, os.path.join(os.path.dirname(path), other)), check)
    _merge(recipe.table, table)
    here = dict.fromkeys(flatten(table), name)
    before, said = _said(text) if text.startswith(RESOLVED) else ([], here)
    recipe.files += [file for file in before if file not in recipe.files]
    recipe.files += [] if name in before else [name]
    recipe.origins |= here | said
    recipe.unsaid = (recipe.unsaid | here.keys()) - said.keys()


def _said(text: str) -> tuple[list[str], dict[str, str]]:
    """Of a resolved.toml: the files that it was made of, and by key those that values are from."""
    files, said, section = list[str](), dict[str, str](), ""
    for line in text.split("\n"):  # and not where else str.splitlines() ends one, inside a value
        if line.startswith(FILES):
            files = [file for file in line.removeprefix(FILES).split(", ") if file != "none"]
        elif line.startswith("["):
            section = line.strip("[]")
        elif origin := _comment(line):
            said[f"{section}.{line.partition(' = ')[0]}"] = EARLIER if origin == COMMAND_LINE else origin
    return files, said


def _comment(line: str) -> str:
    """What stands behind a value, which may have the like in it."""
    parts = line.split("  # ")
    for end in range(1, len(parts)):
        try:
            tomllib.loads("  # ".join(parts[:end]))
        except tomllib.TOMLDecodeError:
            continue
        return "  # ".join(parts[end:])
    return ""


def _read(chain: tuple[str, ...]) -> tuple[str, Table]:
    try:
        text = Path(chain[-1]).read_bytes().decode("utf-8-sig")
        return text, tomllib.loads(text)
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

"""What a run was started with: every key, its value, and the file that the value is from.

A line of the log names the files and what the command line changed; resolved.toml in the run's folder has all keys,
and is a recipe that starts the same run.
"""

import json
import tomllib
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.recipes import COMMAND_LINE, FILES, RESOLVED, Recipe, flatten
from torchtitan_scape.core.files import write_whole

FILE = "resolved.toml"
_HEAD = f"""\
{RESOLVED} After each value stands the file that it is from; where there is none, it is the
# default. Sections of methods that the run does not use are left out where nothing set them. This file is a recipe:
# CONFIG_FILE=resolved.toml starts the same run, in the same folder unless --job.dump_folder names another.
"""


def values_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of every key of a config, those of nested sections as `section.key`."""
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from values_of(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


@dataclass(frozen=True)
class Resolved:
    """A config as it was asked for; what the trainer changes in it later does not stand here.

    files: those of the recipe, in turn. values: of all keys. origins: of those that a file or the command line set.
    """

    config: JobConfig
    files: tuple[str, ...]
    values: dict[str, Any]
    origins: dict[str, str]

    @classmethod
    def of(cls, config: JobConfig, recipe: Recipe) -> "Resolved":
        """A value that neither the recipe nor the defaults have is from the command line."""
        defaults = dict(values_of(JobConfig()))
        del defaults["job.config_file"]  # which is how the recipe was named, and not in it
        said = defaults | flatten(recipe.table)
        values = {key: copy(attrgetter(key)(config)) for key in defaults}
        # What a resolved.toml had as a default is one, as long as defaults are what they were.
        still = {key for key in recipe.unsaid if key in values and values[key] == defaults[key]}
        origins = {key: "" if key in still else recipe.origins.get(key, "") for key in values}
        origins |= {key: COMMAND_LINE for key, value in values.items() if value != said[key]}
        return cls(config, tuple(recipe.files), values, {key: origin for key, origin in origins.items() if origin})

    def line(self) -> str:
        """For the log."""
        changed = [f"{key} = {toml(self.values[key])}" for key, by in self.origins.items() if by == COMMAND_LINE]
        summary = f"Recipe: {', '.join(self.files) or 'none'}"
        return summary + (f"; the command line sets {', '.join(changed)}" if changed else "")

    def text(self) -> str:
        """resolved.toml. A key that is None is left out: TOML has no such value, and it mostly is the default."""
        sections: dict[str, list[str]] = {}
        for key, value in self.values.items():
            section, _, name = key.rpartition(".")
            origin = self.origins.get(key)
            rows = sections.setdefault(section, [])
            if value is not None and (origin or self._used(section)):
                rows.append(f"{name} = {toml(value)}" + (f"  # {origin}" if origin else ""))
            elif value is None and origin:
                rows.append(f"# {name} is None, which no recipe can say: --{key}=None")
        lines = [*_HEAD.splitlines(), f"{FILES}{', '.join(self.files) or 'none'}"]
        for section, rows in sections.items():
            lines += ["", f"[{section}]", *rows] if rows else []
        return "\n".join(lines) + "\n"

    def _used(self, section: str) -> bool:
        return not section.startswith("sync.") or section.split(".")[1] == self.values["sync.method"]

    def write(self, folder: str) -> None:
        """Whole or not at all. A file of the same values stays: started from it, a run would forget who said them.

        Raises ValueError where the folder cannot be written to.
        """
        path, text = Path(folder) / FILE, self.text()
        try:
            if tomllib.loads(path.read_text(encoding="utf-8")) == tomllib.loads(text):
                return
        except (OSError, ValueError):
            pass  # none yet, or another's
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        except OSError as error:
            raise ValueError(f"[job] dump_folder = {folder!r} cannot be written to: {error.strerror}") from None


def toml(value: Any) -> str:
    """A value of a config, not None, as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)

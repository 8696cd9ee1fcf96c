"""The resolved configuration of a run: every key, its value, and the origin of the value.

One log line lists the files and the keys that the command line changed. resolved.toml in the run's folder contains all
keys, and is a recipe that starts the same run.
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
{RESOLVED} The comment after a value names the file that set it; a value without one is
# a default. Sections of unused methods contain only the keys that a file or the command line set. This file is a
# recipe: CONFIG_FILE=resolved.toml starts the same run, in the same folder unless --job.dump_folder sets another.
"""


def values_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for every key of a config; keys of nested sections are `section.key`."""
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from values_of(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


@dataclass(frozen=True)
class Resolved:
    """A config before the trainer changes it: the files of the recipe, the values of all keys, and the origin of each
    key that a file or the command line set.
    """

    config: JobConfig
    files: tuple[str, ...]
    values: dict[str, Any]
    origins: dict[str, str]

    @classmethod
    def of(cls, config: JobConfig, recipe: Recipe) -> "Resolved":
        """Return the config with origins: a value that differs from recipe and default is from the command line."""
        defaults = dict(values_of(JobConfig()))
        del defaults["job.config_file"]  # names the recipe, and is not part of it
        expected = defaults | flatten(recipe.table)
        values = {key: copy(attrgetter(key)(config)) for key in defaults}
        origins = recipe.origins | {key: COMMAND_LINE for key, value in values.items() if value != expected[key]}
        return cls(config, tuple(recipe.files), values, {key: origins[key] for key in values if key in origins})

    def line(self) -> str:
        """Return the log line with the recipe's files, method, optimizer, and the keys that the command line sets."""
        changed = [f"{key} = {toml(self.values[key])}" for key, by in self.origins.items() if by == COMMAND_LINE]
        summary = f"Recipe: {', '.join(self.files) or 'none'}; "
        summary += f"{self.values['sync.method']} with {self.values['optimizer.name']}"
        return summary + (f"; the command line sets {', '.join(changed)}" if changed else "")

    def unused(self) -> list[str]:
        """Return warnings about keys of the command line whose section is not used."""
        lines, method = list[str](), self.values["sync.method"]
        for key in (key for key, by in self.origins.items() if by == COMMAND_LINE):
            section = key.rpartition(".")[0]
            if self.values.get(f"{section}.enable") is False and key != f"{section}.enable":
                lines.append(f"--{key} has no effect with [{section}] enable = false")
            if section.startswith("sync.") and section != f"sync.{method}":
                lines.append(f"--{key} has no effect with [sync] method = {method!r}")
        return lines

    def text(self) -> str:
        """Return the text of resolved.toml. TOML has no null value: keys that are None by default are omitted."""
        sections: dict[str, list[str]] = {}
        for key, value in self.values.items():
            section, _, name = key.rpartition(".")
            origin = self.origins.get(key)
            rows = sections.setdefault(section, [])
            used = not section.startswith("sync.") or section.split(".")[1] == self.values["sync.method"]
            if value is not None and (origin or used):
                rows.append(f"{name} = {toml(value)}" + (f"  # {origin}" if origin else ""))
            elif value is None and origin:
                rows.append(f"# {name} is None, which TOML cannot express: --{key}=None")
        lines = [*_HEAD.splitlines(), f"{FILES}{', '.join(self.files) or 'none'}"]
        for section, rows in sections.items():
            lines += ["", f"[{section}]", *rows] if rows else []
        return "\n".join(lines) + "\n"

    def write(self, folder: str) -> None:
        """Write resolved.toml, or raise OSError. A file with the same values is kept, with its origins."""
        path, text = Path(folder) / FILE, self.text()
        try:
            if tomllib.loads(path.read_text(encoding="utf-8")) == tomllib.loads(text):
                return
        except (OSError, ValueError):
            pass  # it does not exist, or is not readable
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)


def toml(value: Any) -> str:
    """Return a value of a config, not None, in TOML syntax."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)

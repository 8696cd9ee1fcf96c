"""A recipe and the command line become a config, or one line that names the key and what is wrong with its value.

TorchTitan takes TOML values as they are: a string where a number belongs fails much later, or never. Its command line
ends in a box of several lines and SystemExit. Here both end in a ValueError, as everything that a user can mistype.
"""

import contextlib
import difflib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from unicodedata import category

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.recipes import Recipe, Table, load, split_names
from torchtitan_scape.config.resolved import Resolved
from torchtitan_scape.core.patching import environment
from torchtitan_scape.core.type_checks import check_section, check_value
from torchtitan_scape.titan.config import ConfigManager

# Keys that there were, and what to write today.
GONE = {
    "sync.scape.parameters": 'it is now update: "local" is called "replicated", and "gather" "sharded"',
    "sync.scape.wait_scaling": "it is now staleness_scaling",
    "sync.scape.max_wait": "it is now max_staleness",
    "sync.scape.flush_at_end": "it is now flush_at_end under [sync]",
    "sync.scape.wire_dtype": "it is now wire",
    "sync.scape.values_dtype": "it is now values",
    "sync.scape.wait_by": 'it is gone, leave it out: what was "row_column" is the only rule, as it was by default',
}
_CONFIG_FILE = ("--job.config_file", "--job.config-file")


class _Composed(ConfigManager):
    """TorchTitan's, with a table in the place of a file."""

    def __init__(self, table: Table) -> None:
        super().__init__(JobConfig)
        self._table = table

    def _maybe_load_toml(self, args: list[str]) -> Table:
        return self._table

    @staticmethod
    def register_tyro_rules(registry: ConstructorRegistry) -> None:
        """TorchTitan's, and lists of lists of numbers, as a recipe has them."""
        ConfigManager.register_tyro_rules(registry)

        @registry.primitive_rule
        def lists_of_numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
            if info.type != list[list[int]]:
                return None
            return PrimitiveConstructorSpec(
                nargs=1,
                metavar="[[A,B],...]",
                instance_from_str=lambda given: json.loads(given[0]),
                is_instance=lambda value: isinstance(value, list),
                str_from_instance=lambda value: [json.dumps(value)],
            )


def parse(arguments: list[str]) -> JobConfig:
    """Recipe and command line, which wins. Raises ValueError for unknown keys and bad values."""
    return resolve(arguments).config


def resolve(arguments: list[str]) -> Resolved:
    """What `parse` gives, and where its values are from."""
    switches = set(_switches(JobConfig, ""))
    for argument in arguments:
        if any(category(character) in ("Cc", "Cs") for character in argument):
            raise ValueError(f"command line: {argument!r} has a control character in it")
        key, equals, _ = argument.removeprefix("--").replace("-", "_").partition("=")
        was = key.replace(".no_", ".")
        if was in GONE:
            raise ValueError(f"command line: {argument}: {GONE[was]}")
        if equals and key in switches:
            section, _, name = key.rpartition(".")
            raise ValueError(f"command line: {argument}: {key} takes no value; write --{key}, or --{section}.no-{name}")
    recipe = _recipe(arguments)
    asks_help = bool({"-h", "--help"} & set(arguments))
    stderr = io.StringIO()
    try:
        with contextlib.ExitStack() as stack:
            if not asks_help:
                stack.enter_context(contextlib.redirect_stderr(stderr))
                # The message stands in a box, which would break it into lines.
                stack.enter_context(environment(COLUMNS="100000"))
            config = _Composed(recipe.table).parse_args(arguments)
    except SystemExit as end:
        if asks_help or not end.code:
            raise
        blank = ", ".join(repr(argument) for argument in arguments if not argument.strip())
        raise ValueError(f"command line: {_out_of_the_box(stderr.getvalue())} {blank}".rstrip()) from None
    except Exception as error:  # TorchTitan and a module of the user's raise what they like
        stderr.truncate(0)
        raise ValueError(f"the config cannot be used: {' '.join(str(error).split())}") from error
    finally:
        if not asks_help and sys.exc_info()[0] is None:
            sys.stderr.write(stderr.getvalue())  # warnings
    if not isinstance(config, JobConfig):
        raise ValueError("job.custom_config_module: its JobConfig is not one of TorchTitan's")
    check_section(config, "")
    return Resolved.of(config, recipe)


def _switches(section: Any, name: str) -> Iterator[str]:
    """The keys that are on or off."""
    for field in fields(section):
        path = f"{name}.{field.name}".lstrip(".")
        if is_dataclass(field.type):
            yield from _switches(field.type, path)
        elif field.type is bool:
            yield path


def _recipe(arguments: list[str]) -> Recipe:
    """That of the files which the command line names last, empty without any."""
    given = None
    for i, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if key in _CONFIG_FILE and not equals:
            if i + 1 == len(arguments):
                raise ValueError(f"{argument} needs the path of a recipe")
            value = arguments[i + 1]
        if key in _CONFIG_FILE:
            given = value
    if given is None:
        return Recipe()
    recipe = load(given, lambda table: check_table(JobConfig, table, ""))
    if "job.dump_folder" not in recipe.origins:  # two compositions must not write into one folder
        named = "-".join(Path(path).stem for path in split_names(given))
        recipe.table.setdefault("job", {})["dump_folder"] = f"./outputs/{named}"
        recipe.origins["job.dump_folder"] = "the names of the files"
    return recipe


def _out_of_the_box(text: str) -> str:
    """What the command line's parser says, without its frame and the help behind it."""
    lines = [line.strip("╭╮╰╯│ \n") for line in text.splitlines()]
    # The title is in the frame, or above a rule where the terminal has no such characters.
    plain = len(lines) > 1 and not lines[1].strip("-")
    said = []
    for line in lines[2:] if plain else lines[1:] if text.startswith("╭") else lines:
        if not line.strip("─-"):
            break
        said.append(line)
    return " ".join(" ".join(said).split()) or "it cannot be read"


def check_table(section: Any, table: dict[str, Any], name: str) -> None:
    """Compares a TOML table with the dataclass of its section, nested ones too. Raises ValueError."""
    known = {field.name: field.type for field in fields(section)}
    for key, value in table.items():
        if f"{name}.{key}" in GONE:
            raise ValueError(f"[{name}] {key} = {value!r}: {GONE[f'{name}.{key}']}")
        if key not in known:
            near = difflib.get_close_matches(key, [*known, "extends"] if not name else known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            if key == "extends":
                advice = "it stands above the first section"
            what = f"[{name}] {key}" if name else f"the section [{key}]"
            raise ValueError(f"{what} is unknown; {advice}")
        expected, inner = known[key], f"{name}.{key}".lstrip(".")
        if not is_dataclass(expected):
            check_value(name, key, value, expected)
        elif isinstance(value, dict):
            check_table(expected, value, inner)
        else:
            raise ValueError(f"{inner} = {value!r}; it is a section, [{inner}]")

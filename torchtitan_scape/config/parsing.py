"""Parser of recipes and the command line. Errors are one line with the key and the fix.

TorchTitan does not check the types of TOML values, so that a string instead of a number fails much later, or never. Its
command line parser prints a box of several lines and raises SystemExit. Here both raise ValueError, with the same text.
"""

import difflib
import functools
from copy import deepcopy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from unicodedata import category

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.recipes import Recipe, Table, load, split_names
from torchtitan_scape.config.reference import help_text
from torchtitan_scape.config.resolved import Resolved
from torchtitan_scape.core.command import one_line, print_text
from torchtitan_scape.core.files import packaged
from torchtitan_scape.core.options import REMOVED_KEYS, check_value, present_key, renamed, value_of_text
from torchtitan_scape.titan.config import ConfigManager

_CONFIG_FILE = ("--job.config_file", "--job.config-file")


def parse(arguments: list[str]) -> JobConfig:
    """Return the config of the recipe and the command line, which takes precedence, or raise ValueError."""
    return resolve(arguments).config


def resolve(arguments: list[str]) -> Resolved:
    """Return the config of `parse` together with the origin of each value. With --help, print and raise SystemExit."""
    _print_help(arguments)
    for argument in arguments:
        if any(category(character) in ("Cc", "Cs") for character in argument):
            raise ValueError(f"command line: {argument!r} has a control character in it")
    recipe = _recipe(arguments)
    model = recipe.table.get("model", {})
    if "hf_assets_path" in model:
        model["hf_assets_path"] = packaged(model["hf_assets_path"])
    manager = ConfigManager(JobConfig)
    try:
        config_class = manager._maybe_add_custom_config(arguments, recipe.table)
    except Exception as error:  # the user's module raises what it likes
        raise ValueError(f"job.custom_config_module cannot be imported: {one_line(error)}") from error
    table = deepcopy(recipe.table)
    for key, value in _command_line(arguments, _key_types(config_class)).items():
        *sections, name = key.split(".")
        functools.reduce(lambda inner, section: inner.setdefault(section, {}), sections, table)[name] = value
    try:
        config: JobConfig = manager._dict_to_dataclass(config_class, table)
        manager.config = config
        manager._validate_config()
    except Exception as error:  # of sections that refuse a value, or TorchTitan's
        raise ValueError(f"the config cannot be used: {one_line(error)}") from error
    return Resolved.of(config, recipe)


def _command_line(arguments: list[str], types: dict[str, Any]) -> Table:
    """Return the values of the command line by key, of the given types. Raises ValueError for other keys or values."""
    values: Table = {}
    remaining = iter(arguments)
    for argument in remaining:
        given, equals, text = argument.removeprefix("--").partition("=")
        key = given.replace("-", "_")
        positive = key.replace(".no_", ".")  # of a switch
        where = f"command line: {argument}"
        if not argument.startswith("--") or not key:
            raise ValueError(f"command line: {argument!r} is no argument such as --training.steps=100")
        if positive in REMOVED_KEYS:
            raise ValueError(f"{where}: {REMOVED_KEYS[positive]}")
        if (present := present_key(positive)) != positive:
            (section, _, name), negation = present.rpartition("."), "" if key == positive else "no-"
            advice = f"set --{section}.{negation}{name}{equals}{text}"
            raise ValueError(f"{where}: {positive} is now {present}: {advice}")
        if types.get(positive) is bool:
            section, _, name = positive.rpartition(".")
            if equals:
                raise ValueError(f"{where}: {positive} takes no value; write --{positive}, or --{section}.no-{name}")
            values[positive] = key == positive
            continue
        if key not in types:
            raise ValueError(f"{where}: {_advice(key, types)}")
        if not equals and (text := next(remaining, "--")).startswith("--"):
            raise ValueError(f"{where}: {key} needs a value; write --{key}=VALUE")
        values[key] = value_of_text(text, types[key])
        section, _, name = key.rpartition(".")
        try:
            check_value(section, name, values[key], types[key])
        except ValueError as error:
            raise ValueError(f"command line: {error}") from None
    return values


def _advice(key: str, types: dict[str, Any]) -> str:
    """Return what is wrong with an unknown key, and what to do."""
    section = key.rpartition(".")[0]
    if any(each.startswith(f"{key}.") for each in types):
        return f"{key} is a section; --help {key} lists its keys"
    inside = [each for each in types if section and each.startswith(f"{section}.")]
    near = difflib.get_close_matches(key, inside or types, n=1, cutoff=0.8)
    help_for = f"--help {section} lists the keys of its section" if inside else "--help lists the sections"
    return f"the key {key} is unknown; {f'did you mean --{near[0]}?' if near else help_for}"


@functools.cache
def _key_types(section: type) -> dict[str, Any]:
    """Return the type of each key of a section's class; keys of nested sections are `section.key`."""
    key_types: dict[str, Any] = {}
    for field in fields(section):
        kind: Any = field.type
        nested = is_dataclass(kind)
        inner = {f".{key}": each for key, each in _key_types(kind).items()} if nested else {"": kind}
        key_types |= {field.name + key: each for key, each in inner.items()}
    return key_types


def _print_help(arguments: list[str]) -> None:
    """Print the help and exit, if the arguments ask for it: `--help`, or `--help SECTION`."""
    for i, argument in enumerate(arguments):
        if argument in ("-h", "--help"):
            following = arguments[i + 1] if i + 1 < len(arguments) else ""
            print_text(help_text("" if following.startswith("-") else following))
            raise SystemExit(0)


def _recipe(arguments: list[str]) -> Recipe:
    """Return the recipe of the last --job.config_file on the command line; empty if there is none."""
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
    if "job.dump_folder" not in recipe.origins:  # different combinations of files must not share a folder
        named = "-".join(Path(path).stem for path in split_names(given))
        recipe.table.setdefault("job", {})["dump_folder"] = f"./outputs/{named}"
        recipe.origins["job.dump_folder"] = "the names of the files"
    return recipe


def check_table(section: Any, table: dict[str, Any], name: str) -> None:
    """Raise ValueError if a TOML table does not match the dataclass of its section, including nested sections."""
    known = {field.name: field.type for field in fields(section)}
    for key, value in table.items():
        if message := renamed(name, key, value):
            raise ValueError(message)
        if key not in known:
            near = difflib.get_close_matches(key, [*known, "extends"] if not name else known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            if key == "extends":
                advice = "move it above the first section"
            unknown = f"[{name}] {key}" if name else f"the section [{key}]"
            raise ValueError(f"{unknown} is unknown; {advice}")
        expected, inner = known[key], f"{name}.{key}".lstrip(".")
        if not is_dataclass(expected):
            check_value(name, key, value, expected)
        elif isinstance(value, dict):
            check_table(expected, value, inner)
        else:
            raise ValueError(f"{inner} = {value!r}; it must be a section, [{inner}]")

"""Parser of recipes and the command line. Errors are one line with the key and the fix.

TorchTitan does not check the types of TOML values, so that a string instead of a number fails much later, or never. Its
command line parser prints a box of several lines and raises SystemExit. Here both raise ValueError.
"""

import contextlib
import difflib
import functools
import io
import json
import os
import sys
from dataclasses import fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from unicodedata import category

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.recipes import Recipe, Table, load, split_names
from torchtitan_scape.config.reference import help_text
from torchtitan_scape.config.resolved import Resolved
from torchtitan_scape.core.files import packaged, parse_json
from torchtitan_scape.core.patching import environment
from torchtitan_scape.core.renamed_keys import REMOVED_KEYS, present_key, renamed
from torchtitan_scape.core.type_checks import check_section, check_value
from torchtitan_scape.titan.config import ConfigManager, custom_registry

_NO_HELP = tyro.conf.arg(help="")  # the parser would search the sources of the fields for comments
_CONFIG_FILE = ("--job.config_file", "--job.config-file")


class _ArgumentError(Exception):
    """An unknown key on the command line, or a value that its section refuses."""


class _Composed(ConfigManager):
    """TorchTitan's config manager, with a table instead of a file."""

    def __init__(self, table: Table) -> None:
        super().__init__(JobConfig)
        self._table = table

    def _maybe_load_toml(self, args: list[str]) -> Table:
        return self._table

    def parse_args(self, args: list[str]) -> Any:  # type: ignore[override]
        """Return the config. Only the keys on the command line get a parser, because a parser of all is slow to build.

        The keys of a user's config module may have any type, and get TorchTitan's parser. Raises _ArgumentError for an
        unknown key, or a value that its section refuses.
        """
        if self._maybe_add_custom_config(args, self._table) is not JobConfig:
            return super().parse_args(args)
        whole = self._dict_to_dataclass(JobConfig, self._table)
        default = _named_fields(whole, _named_keys(args))
        named = tyro.cli(type(default), args=args, default=default, registry=custom_registry)
        try:
            self.config = _merged(whole, named)
        except ValueError as error:
            raise _ArgumentError(str(error)) from None
        self._validate_config()
        return self.config

    @staticmethod
    @functools.cache  # TorchTitan has one registry, and every parser would add the same rules to it again
    def register_tyro_rules(registry: ConstructorRegistry) -> None:
        """Register TorchTitan's rules, and one for lists of lists of integers."""
        ConfigManager.register_tyro_rules(registry)

        @registry.primitive_rule
        def lists_of_numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
            if info.type != list[list[int]]:
                return None
            return PrimitiveConstructorSpec(
                nargs=1,
                metavar="[[A,B],...]",
                instance_from_str=lambda given: parse_json(given[0]),
                is_instance=lambda value: isinstance(value, list),
                str_from_instance=lambda value: [json.dumps(value)],
            )


def _key_of(argument: str) -> tuple[str, str]:
    """Return the key of an argument, and the same without a negation: (`a.no_b`, `a.b`) for --a.no-b."""
    key = argument.removeprefix("--").partition("=")[0].replace("-", "_")
    return key, key.replace(".no_", ".")


def _named_keys(arguments: list[str]) -> set[str]:
    """Return the keys of the arguments: `a.b` for --a.b=1, and for --a.no-b if it is a switch."""
    types, named = _key_types(JobConfig), set()
    for argument in arguments:
        key, positive = _key_of(argument)
        key = positive if types.get(positive) is bool else key
        if argument.startswith("--") and key:
            if key not in types:
                raise _ArgumentError(f"{argument}: {_advice(key)}")
            named.add(key)
    return named


def _advice(key: str) -> str:
    """Return what is wrong with an unknown key, and what to do."""
    keys, section = _key_types(JobConfig), key.rpartition(".")[0]
    if any(each.startswith(f"{key}.") for each in keys):
        return f"{key} is a section; --help {key} lists its keys"
    inside = [each for each in keys if section and each.startswith(f"{section}.")]
    near = difflib.get_close_matches(key, inside or keys, n=1, cutoff=0.8)
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


def _named_fields(section: Any, keys: set[str]) -> Any:
    """Return a dataclass with the fields of a section that the keys name, and their values."""
    chosen: list[tuple[str, Any, Any]] = []
    for field in fields(section):
        value = getattr(section, field.name)
        inner = {key.partition(".")[2] for key in keys if key.startswith(f"{field.name}.")}
        if inner:
            value = _named_fields(value, inner)
            chosen.append((field.name, Annotated[type(value), _NO_HELP], value))
        elif field.name in keys:
            chosen.append((field.name, Annotated[field.type, _NO_HELP], value))
    return make_dataclass(type(section).__name__, [each[:2] for each in chosen])(*(value for *_, value in chosen))


def _merged(section: Any, named: Any) -> Any:
    """Return a section with the values of its named fields."""
    values = {field.name: getattr(named, field.name) for field in fields(named)}
    nested = {name: _merged(getattr(section, name), value) for name, value in values.items() if is_dataclass(value)}
    return replace(section, **values | nested)


def parse(arguments: list[str]) -> JobConfig:
    """Return the config of the recipe and the command line, which takes precedence, or raise ValueError."""
    return resolve(arguments).config


def resolve(arguments: list[str]) -> Resolved:
    """Return the config of `parse` together with the origin of each value. With --help, print and raise SystemExit."""
    _print_help(arguments)
    types = _key_types(JobConfig)
    for argument in arguments:
        if any(category(character) in ("Cc", "Cs") for character in argument):
            raise ValueError(f"command line: {argument!r} has a control character in it")
        key, positive = _key_of(argument)
        if positive in REMOVED_KEYS:
            raise ValueError(f"command line: {argument}: {REMOVED_KEYS[positive]}")
        if (present := present_key(positive)) != positive:
            (section, _, name), given = present.rpartition("."), "".join(argument.partition("=")[1:])
            advice = f"set --{section}.{'' if key == positive else 'no-'}{name}{given}"
            raise ValueError(f"command line: {argument}: {positive} is now {present}: {advice}")
        if "=" in argument and types.get(key) is bool:
            section, _, name = key.rpartition(".")
            raise ValueError(f"command line: {argument}: {key} takes no value; write --{key}, or --{section}.no-{name}")
    recipe = _recipe(arguments)
    model = recipe.table.get("model", {})
    if "hf_assets_path" in model:
        model["hf_assets_path"] = packaged(model["hf_assets_path"])
    stderr = io.StringIO()
    try:
        # The parser prints its message in a box of this width; a narrow box would break the line.
        with contextlib.redirect_stderr(stderr), environment(COLUMNS="100000"):
            config = _Composed(recipe.table).parse_args(arguments)
    except SystemExit as end:
        if not end.code:
            raise
        blank = ", ".join(repr(argument) for argument in arguments if not argument.strip())
        raise ValueError(f"command line: {_message_in_box(stderr.getvalue())} {blank}".rstrip()) from None
    except _ArgumentError as error:
        raise ValueError(f"command line: {' '.join(str(error).split())}") from None
    except Exception as error:  # TorchTitan and the user's module raise what they like
        raise ValueError(f"the config cannot be used: {' '.join(str(error).split())}") from error
    sys.stderr.write(stderr.getvalue())  # warnings
    if not isinstance(config, JobConfig):
        raise ValueError("job.custom_config_module: its JobConfig is not one of TorchTitan's")
    check_section(config, "")
    return Resolved.of(config, recipe)


def _print_help(arguments: list[str]) -> None:
    """Print the help and exit, if the arguments ask for it: `--help`, or `--help SECTION`."""
    for i, argument in enumerate(arguments):
        if argument in ("-h", "--help"):
            following = arguments[i + 1] if i + 1 < len(arguments) else ""
            text = help_text("" if following.startswith("-") else following)
            try:
                print(text, flush=True)
            except BrokenPipeError:  # the reader has ended, as `head` does
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
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


def _message_in_box(text: str) -> str:
    """Return the message of the command line parser, without its frame and the help text after it."""
    lines = [line.strip("╭╮╰╯│ \n") for line in text.splitlines()]
    # The title is part of the frame, or above a line of dashes if the terminal does not support box characters.
    plain = len(lines) > 1 and not lines[1].strip("-")
    message = []
    for line in lines[2:] if plain else lines[1:] if text.startswith("╭") else lines:
        if not line.strip("─-"):
            break
        message.append(line)
    return " ".join(" ".join(message).split()) or "it cannot be read"


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

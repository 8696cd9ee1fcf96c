"""Fuzz tests: every recipe and command line gives a config, or an error of one line that names the cause.

SCAPE_FUZZ_EXAMPLES sets the number of examples, for example 5000 for a long campaign.
"""

import contextlib
import io
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from torchtitan_scape.config.checks import check_config
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.config.recipes import load
from torchtitan_scape.trainer.layout import layout_of

ROOT = Path(__file__).resolve().parents[2]
# The recipes that run on one rank.
RECIPES = [
    path
    for path in sorted((ROOT / "train_configs").glob("*.toml"))
    if load(str(path)).table["parallelism"]["data_parallel_shard_degree"] == 1
]
fuzz = settings(
    max_examples=int(os.environ.get("SCAPE_FUZZ_EXAMPLES", 15)), suppress_health_check=list(HealthCheck), deadline=None
)


def keys_of(section: Any, name: str = "") -> Iterator[str]:
    for field in fields(section):
        path = f"{name}.{field.name}".lstrip(".")
        if is_dataclass(field.type):
            yield from keys_of(field.type, path)
        else:
            yield path


# Excluded are keys that import a module or read a file by name.
KEYS = [key for key in keys_of(JobConfig) if not key.endswith(("_module", "custom_import", "config_file"))]
SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS})

TEXT = st.text(max_size=12) | st.sampled_from(
    ["", "auto", "float32", "AdamW", "\0", "-1", "nan", "1e3", "op", "true", "a,b"]
)
INTEGERS = st.integers(-3, 9) | st.integers() | st.sampled_from([2**31, 2**63, -(2**63), 10**30])
FLOATS = st.floats(0, 1) | st.floats() | st.sampled_from([math.nan, math.inf, -0.0, 1e308])
PLAIN = st.booleans() | INTEGERS | FLOATS | TEXT
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(st.sampled_from(["a", "steps"]), PLAIN, max_size=2)


def toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {toml(entry)}' for key, entry in value.items())}}}"
    return str(value).lower()


def with_keys(recipe: dict[str, Any], changes: dict[str, Any]) -> str:
    """Return the recipe with changed values as TOML."""
    flat: dict[str, dict[str, Any]] = {}

    def walk(table: dict[str, Any], name: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                walk(value, f"{name}.{key}".lstrip("."))
            else:
                flat.setdefault(name, {})[key] = value

    walk(recipe, "")
    for path, value in changes.items():
        section, _, key = path.rpartition(".")
        flat.setdefault(section, {})[key] = value
    lines = []
    for section, table in flat.items():
        lines += [f"[{section}]", *(f"{key} = {toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a run with one rank."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NGPU"):
        monkeypatch.setenv(name, "1")
    monkeypatch.chdir(ROOT)


def outcome(arguments: list[str]) -> str:
    """Return "" if the config is valid, otherwise the message of the ValueError. Other exceptions are raised."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            config = parse(arguments)
            check_config(config, "cpu")
            layout_of(config)
    except ValueError as error:
        message = str(error)
        assert type(error) is ValueError, repr(error)
        assert message.strip() and "\n" not in message and len(message) < 2000, repr(message)
        return message
    return ""


def outcome_of(content: bytes, arguments: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_bytes(content)
        return outcome([f"--job.config_file={path}", *arguments])


def names(message: str, key: str, value: Any) -> bool:
    """Return whether the message contains the key, also with hyphens, a word of it, or the value."""
    parts = [part for part in key.rpartition(".")[2].split("_") if len(part) > 3]
    parts.append(key.replace("_", "-"))
    return any(part in message for part in [key, *parts, repr(value).strip("'"), str(value)])


@fuzz
@given(st.sampled_from(RECIPES), st.sampled_from(KEYS), VALUES)
def test_fuzz_one_value_of_a_recipe(recipe: Path, key: str, value: Any) -> None:
    message = outcome_of(with_keys(load(str(recipe)).table, {key: value}).encode(), [])
    assert not message or names(message, key, value), (message, key, value)


@fuzz
@given(
    st.sampled_from(RECIPES),
    st.dictionaries(st.sampled_from(KEYS) | st.builds("{}.{}".format, st.sampled_from(SECTIONS), st.just("x")), VALUES),
)
def test_fuzz_several_values_of_a_recipe(recipe: Path, changes: dict[str, Any]) -> None:
    message = outcome_of(with_keys(load(str(recipe)).table, changes).encode(), [])
    assert message or not any(key.endswith(".x") for key in changes)


@fuzz
@given(st.sampled_from(RECIPES), st.data())
def test_fuzz_a_damaged_recipe(recipe: Path, data: st.DataObject) -> None:
    content = recipe.read_bytes()
    if b"extends" in content:  # its relative paths are not valid where the damaged file will be
        content = with_keys(load(str(recipe)).table, {}).encode()
    begin = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(begin, len(content)))
    outcome_of(content[:begin] + data.draw(st.binary(max_size=20)) + content[end:], [])


@fuzz
@given(st.binary(max_size=200) | st.text(st.sampled_from("[]{}=.\"'\n#a1-_ ,"), max_size=80).map(str.encode))
def test_fuzz_arbitrary_bytes_as_recipe(content: bytes) -> None:
    assert outcome_of(content, [])  # at least [optimizer] name is missing


@fuzz
@given(
    st.sampled_from(RECIPES),
    st.lists(
        st.builds("--{}={}".format, st.sampled_from(KEYS), PLAIN)
        | st.builds("--{}".format, st.sampled_from(KEYS))
        | st.builds("--{}".format, TEXT)
        | TEXT,
        min_size=1,
        max_size=3,
    ),
)
def test_fuzz_a_command_line(recipe: Path, arguments: list[str]) -> None:
    # Exclude the help text and the parser's own options.
    assume(not any(a.startswith(("-h", "--help", "--tyro")) for a in arguments))
    message = outcome([f"--job.config_file={recipe}", *arguments])
    keys = [a.partition("=")[0].removeprefix("--") for a in arguments]
    values = [a.partition("=")[2] or a for a in arguments]
    assert not message or any(names(message, key, v) for key, v in zip(keys, values, strict=True)), (message, arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--training.stpes=3"], r"the key training.stpes is unknown; did you mean --training.steps\?"),
        (["--optimizer.learning_rate=3"], "learning_rate is unknown; --help optimizer lists the keys of its section"),
        (["--trainng.steps=3"], r"trainng.steps is unknown; did you mean --training.steps\?"),
        (["--nothing=3"], "nothing is unknown; --help lists the sections"),
        (["--training=3"], "--training=3: training is a section; --help training lists its keys"),
        (["3"], "command line: '3' is no argument such as --training.steps=100"),
        (["--training.steps=many"], r"command line: \[training\] steps = 'many'; it must be an integer"),
        (["--training.steps"], "command line: --training.steps: training.steps needs a value; write --training.steps="),
        (["--sync.method=gossip"], r"command line: \[sync\] method = 'gossip'; it must be 'dense' \| 'scape'"),
        (
            ["--metrics.enable_tensorboard=False"],
            "enable_tensorboard takes no value; .* --metrics.no-enable_tensorboard",
        ),
        (["--optimizer.lr=nan"], r"\[optimizer\] lr = nan; it must be finite"),
        (["--optimizer.beta2=1"], r"\[optimizer\] beta2 = 1.0; it must be 0 or more, and less than 1"),
        (["--comm.init_timeout_seconds=0"], r"\[comm\] init_timeout_seconds = 0; it must be 1 or more"),
        (["--debug.seed=99999999999999999999"], r"\[debug\] seed = 99999999999999999999; it is beyond 64 bits"),
        (["--job.dump_folder=a\0b"], "has a control character"),
        (["--job.custom_config_module=no.such"], "No module named 'no'"),
        (
            ["--training.dataloader.num_workers=1"],
            r"training.dataloader.num_workers is not supported together with \[sync\]",
        ),
        (["--checkpoint.enable", "--checkpoint.keep_latest_k=1"], "keep_latest_k = 1; it must be 0"),
        (["--data.epochs=-1"], r"\[data\] epochs = -1; it must be 0 \(no end\) or more"),
        (["--job.config_file"], "needs the path of a recipe"),
    ],
)
def test_command_line_errors_name_the_cause(arguments: list[str], message: str) -> None:
    recipe = [] if arguments == ["--job.config_file"] else ["--job.config_file=train_configs/embedded.toml"]
    assert re.search(message, outcome([*recipe, *arguments]))


def test_lists_on_the_command_line() -> None:
    given = ["--observe.histograms=1,2", "--observe.windows=[[1,3]]", "--model.converters=a,b"]
    config = parse([*given, "--parallelism.module_fqns_per_model_part", '[["a"],["b"]]'])
    assert (config.observe.histograms, config.observe.windows) == ([1, 2], [[1, 3]])
    assert (config.model.converters, config.parallelism.module_fqns_per_model_part) == (["a", "b"], [["a"], ["b"]])
    assert parse(["--observe.histograms", "7"]).observe.histograms == [7]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"training = 3", r"training = 3; it must be a section, \[training\]"),
        (b"[trainig]\nsteps = 3", r"section \[trainig\] is unknown; did you mean 'training'"),
        (b"[training]\nstep = 3", r"\[training\] step is unknown; did you mean 'steps'"),
        (b"[training]\nsteps = 'ten'", r"\[training\] steps = 'ten'; it must be an integer"),
        (b"[training]\nsteps = true", r"\[training\] steps = True; it must be an integer"),
        (b"[quantize.linear.float8]\nemulate = 1", r"\[quantize.linear.float8\] emulate = 1; it must be bool"),
        (b"[model]\nconverters = 'a'", "converters = 'a'; it must be a list of strings"),
        (b"[job]\ndescription = '\xff'", "recipe.toml is not valid TOML: 'utf-8' codec can't decode"),
        (b"[training]\nsteps = " + b"9" * 5000, "recipe.toml is not valid TOML: Exceeds the limit"),
        (b"a = " + b"[" * 5000, "recipe.toml is not valid TOML: "),
    ],
)
def test_recipe_errors_name_the_cause(content: bytes, message: str) -> None:
    assert re.search(message, outcome_of(content, []))

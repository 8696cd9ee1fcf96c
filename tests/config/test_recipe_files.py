"""Recipe files: merging, origins of values, and errors that name a file."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_recipes import RECIPES, check
from torchtitan_scape.config.parsing import parse, resolve
from torchtitan_scape.config.recipes import COMMAND_LINE, RESOLVED, flatten, load
from torchtitan_scape.config.resolved import Resolved


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that writes recipes into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(**contents: str) -> None:
        for name, content in contents.items():
            path = tmp_path / f"{name.replace('__', '/')}.toml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)

    yield write


def test_files_are_merged_in_order_key_by_key(files: Any) -> None:
    files(
        first='[training]\nsteps = 1\nseq_len = 8\n[model]\nconverters = ["a"]\n[training.dataloader]\nnum_workers = 1',
        sub__second='extends = "../first.toml"\n[training]\nsteps = 2',
        sub__third='[model]\nconverters = ["c"]\n[optimizer]\nlr = 0.1',
        last='extends = ["sub/second.toml", "sub/third.toml"]\n[optimizer]\neps = 1e-6\n[sync]\n',
        more="[optimizer]\neps = 1e-7",
    )
    recipe = load("last.toml,more.toml", check)
    assert recipe.files == ["sub/../first.toml", "sub/second.toml", "sub/third.toml", "last.toml", "more.toml"]
    assert {key: (value, recipe.origins[key]) for key, value in flatten(recipe.table).items()} == {
        "training.steps": (2, "sub/second.toml"),
        "training.seq_len": (8, "sub/../first.toml"),
        "training.dataloader.num_workers": (1, "sub/../first.toml"),
        "model.converters": (["c"], "sub/third.toml"),
        "optimizer.lr": (0.1, "sub/third.toml"),
        "optimizer.eps": (1e-7, "more.toml"),
    }


FOUR = {f"r{i}": f'extends = "r{i + 1}.toml"' for i in range(5)}


@pytest.mark.parametrize(
    "contents, names, message",
    [
        ({"a": 'extends = "b.toml"', "b": 'extends = "./a.toml"'}, "a.toml", "a cycle: a.toml -> b.toml -> ./a.toml"),
        ({"a": 'extends = "a.toml"'}, "a.toml", "in a cycle: a.toml -> a.toml"),
        ({"a": "extends = ['b.toml']"}, "a.toml", "a.toml -> b.toml cannot be read: No such file or directory"),
        ({}, "a.toml", "the recipe a.toml cannot be read: No such file or directory"),
        ({"a": 'extends = "b.toml"', "b": "[sync"}, "a.toml", "a.toml -> b.toml is not valid TOML: "),
        (
            {**FOUR, "r5": ""},
            "r0.toml",
            "in a chain of more than 4: r0.toml -> r1.toml -> r2.toml -> r3.toml -> r4.toml -> r5.toml",
        ),
        ({"a": 'extends = "."'}, "a.toml", "a.toml -> . cannot be read: Is a directory"),
        ({"a": "extends = 3"}, "a.toml", "a.toml: extends = 3; it must be the path of a recipe, or a list of paths"),
        ({"a": "extends = ['']"}, "a.toml", "a.toml: extends = ['']; it must be the path"),
        ({"a": 'extends = "b\\u0000"'}, "a.toml", "a.toml: extends = 'b\\x00'; it must be the path"),
        ({"a": f"extends = 0x{'f' * 9000}"}, "a.toml", "a.toml: extends = a very large number; it must be the path"),
        ({"a": 'extend = "b.toml"'}, "a.toml", "a.toml: the section [extend] is unknown; did you mean 'extends'?"),
        ({"a": '[sync]\nextends = "b"'}, "a.toml", "a.toml: [sync] extends is unknown; move it above the first"),
        ({"a": 'extends = "b.toml"', "b": "[sync.scape]\ndensty = 1"}, "a.toml", "b.toml: [sync.scape] densty is"),
        ({"a": "", "b": "[training]\nsteps = 'ten'"}, "a.toml,b.toml", "b.toml: [training] steps = 'ten'; it must be"),
        ({"a": ""}, "a.toml,", "'a.toml,' contains an empty name"),
        ({"a": ""}, "a.toml,b.toml", "the recipe b.toml cannot be read"),
    ],
)
def test_recipe_errors_name_the_file(contents: dict[str, str], names: str, message: str, files: Any) -> None:
    files(**contents)
    with pytest.raises(ValueError) as error:
        parse([f"--job.config_file={names}"])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_spaces_and_byte_order_marks_are_ignored(files: Any) -> None:
    files(a="\ufeff[training]\nsteps = 1", b="[training]\nsteps = 2")
    assert load("a.toml, b.toml").files == ["a.toml", "b.toml"]


def test_a_chain_of_four_files_is_allowed(files: Any) -> None:
    files(**FOUR | {"r4": "[training]\nsteps = 5"})
    assert load("r0.toml").table == {"training": {"steps": 5}}
    files(a='extends = ["b.toml", "c.toml"]', b='extends = "c.toml"', c="")
    assert load("a.toml").files == ["c.toml", "b.toml", "c.toml", "a.toml"], "a file that is named twice is not a cycle"


# ------------------------------------------------------------------------------------------ resolved.toml


def test_resolved_toml_records_origins_and_starts_the_same_run(tmp_path: Path) -> None:
    names = [str(RECIPES / f"{name}.toml") for name in ("llama_500m", "methods/adamw", "machines/frontier")]
    path = tmp_path / "run" / "resolved.toml"
    command = [f"--job.config_file={','.join(names)}", "--training.steps=3", '--job.description="ü" \\ 1']
    first = resolve([*command, "--model.converters=a,b", "--optimizer.lr=3e-4"])
    assert first.line() == (
        f"Recipe: {', '.join(first.files)}; dense with AdamW; the command line sets "
        'job.description = "\\"ü\\" \\\\ 1", model.converters = ["a", "b"], training.steps = 3'
    ), "a value on the command line that equals the file's is attributed to the file"
    first.write(str(path.parent))
    text = path.read_text()
    for line in (
        'dump_folder = "./outputs/llama_500m-adamw-frontier"  # the names of the files',
        'name = "AdamW"  # ' + names[1],
        f"lr = 0.0003  # {RECIPES}/models/llama_500m.toml",
        "beta2 = 0.95  # " + first.origins["optimizer.beta2"],
        "steps = 3  # command line",
        "data_parallel_shard_degree = 8  # " + names[2],
        "gc_freq = 50",
    ):
        assert f"\n{line}\n" in text, line
    assert "density_warmup_steps = 2000" in text and "[sync.topk]" not in text, "unused sections: set keys only"
    listed = flatten(tomllib.loads(text))
    assert set(first.origins) <= listed.keys() and "job.config_file" not in listed

    again = resolve([f"--job.config_file={path}"])
    assert again.values == first.values and not any(by == COMMAND_LINE for by in again.origins.values())
    again.write(str(path.parent))
    assert path.read_text() == text, "the first origins are kept"
    other = resolve([f"--job.config_file={path}", "--training.steps=4"])
    other.write(str(path.parent))
    assert other.files == (*first.files, str(path)) and other.origins["training.steps"] == COMMAND_LINE
    assert other.origins["model.converters"] == str(path)
    once_more = resolve([f"--job.config_file={path}"])
    assert once_more.files == other.files
    assert path.read_text() == other.text() != text and once_more.values == other.values
    assert [p.name for p in path.parent.iterdir()] == ["resolved.toml"]


def test_resolved_toml_of_an_earlier_version_starts_the_run(tmp_path: Path) -> None:
    """It has all keys of the sections in use, by their former names. Other recipes with such a name are refused."""
    text = """\
{head}The rest of the line.
# Files, of which a later one wins: train_configs/embedded.toml
[sync]
method = "sparta"  # command line
[sync.scape]
wire = "int4"  # train_configs/embedded.toml
[sharding]
weights = "int8"
gradients = "dense"
[sharding.levels]
sum = "float32"
[sharding.tagc]
codec = "packed"
sparsity = 0.8
"""
    path = tmp_path / "resolved.toml"
    path.write_text(text.format(head=RESOLVED))
    found = resolve([f"--job.config_file={path}"])
    sharding = found.config.sharding
    assert (found.config.sync.scape.code, sharding.weights_code, sharding.tagc.sparsity) == ("int4", "int8", 0.8)
    assert found.files == ("train_configs/embedded.toml", str(path))
    path.write_text(text.format(head="# "))
    with pytest.raises(ValueError, match=r"\[sync.scape\] wire is now code"):
        resolve([f"--job.config_file={path}"])


def test_resolved_toml_comments_values_that_toml_cannot_express() -> None:
    """TOML has no None. A key that is None by default is omitted; one that the command line set to None is not."""
    given = {"sync.method": "dense", "a.b": None, "a.c": None, "sync.scape.d": 1, "sync.dense.e": 2}
    text = Resolved(parse([]), (), given, {"a.b": COMMAND_LINE}).text()
    body = text[text.index("\n[") :].split("\n")
    assert body == [
        *("", "[sync]", 'method = "dense"', ""),
        *("[a]", "# b is None, which TOML cannot express: --a.b=None", "", "[sync.dense]", "e = 2", ""),
    ]


def test_without_recipe_and_arguments_all_values_are_defaults() -> None:
    nothing = resolve([])
    assert nothing.files == () and nothing.origins == {} and nothing.line() == "Recipe: none; scape with AdamW"


def test_the_last_config_file_on_the_command_line_wins(files: Any) -> None:
    """run_train.sh adds its own --job.config_file before the user's arguments."""
    files(a="[training]\nsteps = 1", b="[training]\nsteps = 2\n[job]\ndump_folder = 'there'")
    config = parse(["--job.config_file", "a.toml", "--job.config-file=b.toml"])
    assert (config.training.steps, config.job.dump_folder) == (2, "there")

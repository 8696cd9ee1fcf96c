"""The commands and the code of README and docs/, as they stand there.

Python runs on two ranks. A command is taken as far as a CPU can take it in seconds: the planner answers; of a run its
config is checked and its ranks are laid out; of a script its options are read. Runs themselves are slow tests.
"""

import argparse
import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from scripts.study.grid import GRIDS, Grid
from tests import server
from tests.docs.pages import PAGES, ROOT, Command, blocks, commands, parse_command, read
from tests.methods import test_contract
from tests.pool import Pool
from topology.links import SCHEMA, Links
from topology.machines import get_machine
from torchtitan_scape.config.checks import check_config
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.methods.registry import METHODS, MethodEntry

COMMANDS = [command for page in PAGES for command in commands(page)]
PLANS = [command for command in COMMANDS if command.arguments[:2] == ["-m", "torchtitan_scape.planner.plan"]]
SEVERAL_HOSTS = ("NNODES", "RDZV_ENDPOINT")
# Options of programs that are not ours, which a command may have in front of what they start.
TORCHRUN, SBATCH = re.compile(r"--(nproc_per_node|nnodes)=\w+"), re.compile(r"--nodes=\d+")


class Parsed(BaseException):
    """Raised in the place of what a script does: its options have been read."""


@contextmanager
def stopping_after_the_options() -> Iterator[None]:
    """Scripts end once argparse has read their options. Subparsers are parsers inside a parser: the outermost ends."""
    depth = 0
    originals = {name: getattr(argparse.ArgumentParser, name) for name in ("parse_args", "parse_known_args")}

    def wrap(name: str) -> Any:
        def read(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                result = originals[name](self, *args, **kwargs)
            finally:
                depth -= 1
            if depth == 0:
                raise Parsed(result)
            return result

        return read

    with patch.multiple(argparse.ArgumentParser, **{name: wrap(name) for name in originals}):
        yield


def check_module(module: str, arguments: list[str]) -> None:
    """Whether `python -m MODULE ARGUMENTS` would start: its own parser reads them."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    if spec.submodule_search_locations:
        check_module(f"{module}.__main__", arguments)
        return
    if module == "scripts.study.__main__":
        sets = arguments[arguments.index("--sets") + 1].split(",") if "--sets" in arguments else []
        Grid(GRIDS / f"{arguments[1]}.toml").choose(sets)
    source = (ROOT / spec.origin).read_text()
    if "argparse" not in source:
        assert all(argument in source for argument in arguments), f"{module} does not know {arguments}"
        return
    before = list(sys.path), dict(os.environ)
    with patch.object(sys, "argv", [spec.origin, *arguments]), stopping_after_the_options():
        try:
            runpy.run_module(module, run_name="__main__")
        except Parsed as read:
            rest = read.args[0][1] if isinstance(read.args[0], tuple) else []
            if rest:
                parse(["--job.config_file=train_configs/embedded.toml", *rest])
        else:
            raise AssertionError(f"{module} read no options")
        finally:
            sys.path[:] = before[0]
            os.environ.clear()
            os.environ.update(before[1])


def check_run(command: Command) -> None:
    """A recipe and what overrides it: known keys, values that fit, ranks that can be laid out."""
    from torchtitan_scape.trainer.layout import layout_of

    recipes = command.variables.get("CONFIG_FILE", "train_configs/embedded.toml").split(",")
    given = ",".join(str(ROOT / recipe) for recipe in recipes)
    config = parse([f"--job.config_file={given}", *command.arguments])
    if command.variables.get("COMM_MODE"):
        config.comm.mode = command.variables["COMM_MODE"]
    check_config(config, "cpu")
    per_node = command.variables.get("NGPU", "2")
    world = str(int(per_node) * int(command.variables.get("NNODES", "1")))
    with patch.dict(os.environ, NGPU=world, WORLD_SIZE=world, LOCAL_WORLD_SIZE=per_node):
        layout_of(config)


def check(command: Command) -> None:
    program, arguments = command.program, command.arguments
    readers = ("run_train.sh", "run_tests.sh", "scripts/slurm/launch.sh", "scripts/gpu_check.sh")
    sources = "\n".join((ROOT / name).read_text() for name in readers)
    for name in command.variables:
        assert name in sources, f"{command.text}: nothing reads {name}"
    if program == "./run_train.sh":
        check_run(command)
    elif program == "./run_tests.sh":
        for argument in arguments:
            assert (ROOT / argument).exists() or argument in sources, argument
    elif program == "scripts/gpu_check.sh":
        check_module("scripts.gpu.check", arguments)
    elif program == "torchrun":
        while TORCHRUN.fullmatch(arguments[0]):
            arguments = arguments[1:]
        assert arguments[0] == "-m", command.text
        check_module(arguments[1], arguments[2:])
    elif program == "sbatch":
        while arguments[0] == "-A" or SBATCH.fullmatch(arguments[0]):
            arguments = arguments[2 if arguments[0] == "-A" else 1 :]
        assert (ROOT / arguments[0]).exists(), arguments[0]
        run = command.variables.get("TRAIN_SCRIPT", "").split()
        if run:
            check_module(run[1], arguments[1:])
        else:
            check_run(Command(command.page, command.text, program, arguments[1:], command.variables | {"NGPU": "8"}))
    elif program == "python":
        assert arguments[0] == "-m", f"{command.text}: scripts are modules"
        own, rest = arguments[2:], []
        if "--" in own:
            rest = own[own.index("--") + 1 :]
        check_module(arguments[1], own)
        if rest and rest[0].startswith("--"):  # the trainer's
            check_run(Command(command.page, command.text, program, rest, command.variables))
        elif rest and (inner := parse_command(command.page, " ".join(rest))):
            check(inner)
    else:
        assert program == ".venv/bin/tensorboard", f"{command.text}: this test does not know {program}"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text[:60]}")
def test_a_command_is_one_that_this_repository_takes(command: Command) -> None:
    check(command)


@pytest.mark.parametrize("command", PLANS, ids=lambda command: command.text[:80])
def test_the_planner_answers(command: Command, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan_scape.planner.plan import main

    monkeypatch.chdir(tmp_path)
    levels = Links.from_machine(get_machine("frontier")).levels
    stored = {name: {"latency": link.latency, "bandwidth": link.bandwidth} for name, link in levels.items()}
    (tmp_path / "links.json").write_text(json.dumps({"schema": SCHEMA, "memory_bandwidth": 1e12, "levels": stored}))
    with redirect_stdout(io.StringIO()) as output:
        assert main(command.arguments[2:]) == 0
    # Of Frontier's links, where dense gradients hide behind the backward pass, as the page says.
    answer = "not 1.5 x" if "--shard-axis" in command.arguments else "Compress: no"
    assert answer in output.getvalue() or "--paper" in command.arguments


def test_the_bytes_of_the_kernels_are_those_that_the_script_tells(tmp_path: Any) -> None:
    command = next(
        c for c in COMMANDS if c.page == "docs/kernels.md" and "scripts.benchmarks.kernel_bytes" in c.arguments
    )
    with patch.object(sys, "argv", [*command.arguments[1:], f"--output={tmp_path}"]), redirect_stdout(io.StringIO()):
        runpy.run_module(command.arguments[1], run_name="__main__")
    rows = [row for row in (tmp_path / "bytes.md").read_text().splitlines() if row.startswith("| llama")]
    assert len(rows) == 6 and all(row in read("docs/kernels.md") for row in rows)


SHORT = ["--training.steps=1", "--training.seq_len=32", "--validation.seq_len=32", "--validation.steps=1"]


def short_runs() -> Iterator[tuple[dict[str, str], list[str]]]:
    """Variables and arguments of every run once, on this host alone: of one step with short sequences, or, where
    the recipe's tokenizer and text are not here, a dry run."""
    seen = []
    for command in COMMANDS:
        if command.program == "./run_train.sh":
            variables = {name: value for name, value in command.variables.items() if name not in SEVERAL_HOSTS}
            recipe = variables.get("CONFIG_FILE", "")
            if large := any(model in recipe for model in ("llama", "gpt", "radius")):
                variables["COMM_MODE"] = "fake_backend"
            run = variables, [*command.arguments, *([] if large else SHORT)]
            if run not in seen:
                seen.append(run)
                yield run


def with_its_data(arguments: list[str], folder: Any) -> list[str]:
    """A run's arguments, where it reads what another command of the pages prepares: that is done, in `folder`."""
    for command in COMMANDS:
        if "torchtitan_scape.data.prepare" in command.arguments and "--output" in command.arguments:
            output = command.arguments[command.arguments.index("--output") + 1]
            if f"--training.dataset_path={output}" in arguments:
                own = [str(folder) if argument == output else argument for argument in command.arguments]
                subprocess.run([server.python(), *own], cwd=ROOT, check=True, timeout=300)
                return [argument.replace(output, str(folder)) for argument in arguments]
    return arguments


@pytest.mark.slow
@pytest.mark.parametrize(("variables", "arguments"), short_runs(), ids=str)
def test_a_run_runs(variables: dict[str, str], arguments: list[str], tmp_path: Any) -> None:
    arguments = with_its_data(arguments, tmp_path / "data")
    environment = os.environ | {"PYTHON": server.python(), "NGPU": "2", "OMP_NUM_THREADS": "1"} | variables
    command = [str(ROOT / "run_train.sh"), *arguments, f"--job.dump_folder={tmp_path}"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    assert ("Dry run: everything was built" if "COMM_MODE" in variables else "Summary of 1 steps") in output


# ---------------------------------------------------------------------------------------------- Python


def run_page(codes: list[str]) -> float | None:
    """The Python of a page, in one namespace, as a rank of two. The last loss, where it has one."""
    scope: dict[str, Any] = {"__name__": "page"}
    torch.manual_seed(dist.get_rank())
    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        for code in codes:
            exec(compile(code, "page", "exec"), scope)
    if "model" in scope:
        weights = torch.cat([p.detach().view(-1) for p in scope["model"].parameters()])
        gathered = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, weights)
        assert all(torch.equal(weights, other) for other in gathered)
    return float(scope["loss"]) if "loss" in scope else None


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_of_a_page_runs(page: str, pool2: Pool) -> None:
    losses = pool2(run_page, blocks(page, "python"))
    assert all(loss is None or loss < 1.0 for loss in losses)


def test_there_is_python_to_run() -> None:
    assert {page for page in PAGES if blocks(page, "python")} >= {"docs/own_loop.md", "docs/adding_a_method.md"}


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_method_of_the_page_keeps_the_contract(replicas: int) -> None:
    """With the very lines that the page would add to the registry and to the contract."""
    scope: dict[str, Any] = {"__name__": "page", "MethodEntry": MethodEntry, "Case": test_contract.Case}
    exec(blocks("docs/adding_a_method.md", "python")[0], scope)
    registry, contract = (
        code.splitlines()[2] for code in blocks("docs/adding_a_method.md", "") if code.splitlines()[1].strip() == "..."
    )
    with patch.dict(METHODS, eval(f"{{{registry}}}", scope)):
        [case] = eval(f"[{contract}]", scope)
        test_contract.test_delivered_and_pending_is_what_was_given(case, replicas)
        test_contract.test_bytes_are_those_that_were_planned(case, replicas)
        test_contract.test_its_dense_limit(case)
        test_contract.test_a_skipped_step_changes_nothing(case)
        test_contract.test_send_all_leaves_nothing_pending(case)
        test_contract.test_what_it_declares_is_all_that_steps_depend_on(case, 4)

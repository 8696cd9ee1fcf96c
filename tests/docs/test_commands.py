"""The commands and the code in README and docs/.

Python code runs on two ranks. Commands are checked as far as possible on a CPU in seconds: planner commands run; for a
training run the config is checked and the layout is planned; for a script the options are parsed. The slow tests
execute the runs.
"""

import argparse
import contextlib
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
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from scripts.benchmarks.memory import kernel_table
from scripts.study.grid import GRIDS, Grid
from tests import server
from tests.docs.pages import PAGES, ROOT, Command, blocks, commands, parse_command, read
from tests.methods import test_contract
from tests.pool import Pool
from torchtitan_scape.config.checks import check_config
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.topology.machines import SCHEMA, Links, get_machine

COMMANDS = [command for page in PAGES for command in commands(page)]
PLANS = [command for command in COMMANDS if command.arguments[:2] == ["-m", "torchtitan_scape.planner.plan"]]
SEVERAL_HOSTS = ("NNODES", "RDZV_ENDPOINT")
# Options of other programs, which a command may contain before the module that they start.
TORCHRUN = re.compile(r"--(nproc_per_node|nnodes|rdzv_backend|rdzv_endpoint)=[\w:]+")
SBATCH = re.compile(r"--nodes=\d+|--no-kill")


class Parsed(BaseException):
    """Raised instead of running a script, after its options were parsed."""


@contextmanager
def stopping_after_the_options() -> Iterator[None]:
    """Stop scripts after argparse has parsed their options. Subparsers are nested; the outermost parser stops."""
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
    """Check that the module's own parser accepts the arguments."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    if spec.submodule_search_locations:
        check_module(f"{module}.__main__", arguments)
        return
    if module == "scripts.study.__main__" and arguments[0] != "compare":
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
    """Check a recipe and its overrides: keys, values and layout."""
    from torchtitan_scape.trainer.layout import layout_of

    recipes = command.variables.get("CONFIG_FILE", "train_configs/embedded.toml").split(",")
    given = ",".join(str(ROOT / recipe) for recipe in recipes)
    config = parse([f"--job.config_file={given}", *command.arguments])
    if command.variables.get("COMM_MODE"):
        config.comm.mode = command.variables["COMM_MODE"]
    check_config(config, "cpu")
    per_node = command.variables.get("NGPU", "2")
    world = str(int(per_node) * int(command.variables.get("NNODES", "1").rpartition(":")[2]))
    with patch.dict(os.environ, NGPU=world, WORLD_SIZE=world, LOCAL_WORLD_SIZE=per_node):
        layout_of(config)


def check(command: Command) -> None:
    program, arguments = command.program, command.arguments
    readers = [ROOT / name for name in ("run_train.sh", "run_tests.sh", "scripts/gpu_check.sh")]
    sources = "\n".join(path.read_text() for path in [*readers, *ROOT.glob("scripts/slurm/*.sh")])
    for name in command.variables.keys() - {"CUDA_VISIBLE_DEVICES"}:  # read by CUDA
        assert name in sources, f"{command.text}: nothing reads {name}"
    if program == "./run_train.sh":
        check_run(command)
    elif program == "./run_tests.sh":
        for argument in arguments:
            assert (ROOT / argument).exists() or argument in sources, argument
    elif program == "scripts/gpu_check.sh":
        check_module("scripts.gpu.check", arguments)
    elif program == "torchrun":
        options = {}
        while TORCHRUN.fullmatch(arguments[0]):
            name, _, options[name] = arguments[0].partition("=")
            arguments = arguments[1:]
        assert arguments[0] == "-m", command.text
        if arguments[1] == "torchtitan_scape.train":
            ranks = {"NGPU": options["--nproc_per_node"], "NNODES": options.get("--nnodes", "1")}
            check_run(Command(command.page, command.text, program, arguments[2:], ranks))
        elif arguments[1] != "scripts.examples.titan_debug":  # needs TorchTitan 0.3.0; a slow test of examples runs it
            check_module(arguments[1], arguments[2:])
    elif program == "sbatch":
        while arguments[0] in ("-A", "-p") or SBATCH.fullmatch(arguments[0]):
            arguments = arguments[2 if arguments[0] in ("-A", "-p") else 1 :]
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
        if rest and rest[0].startswith("--"):  # the trainer's help
            check_run(Command(command.page, command.text, program, rest, command.variables))
        elif rest and (inner := parse_command(command.page, " ".join(rest))):
            check(inner)
    else:
        assert program == "tensorboard", f"{command.text}: this test does not know {program}"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text[:60]}")
def test_documented_commands_are_valid(command: Command) -> None:
    check(command)


@pytest.mark.parametrize("command", PLANS, ids=lambda command: command.text[:80])
def test_documented_planner_commands_succeed(command: Command, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan_scape.planner.plan import main

    monkeypatch.chdir(tmp_path)
    levels = Links.from_machine(get_machine("frontier")).levels
    stored = {name: {"latency": link.latency, "bandwidth": link.bandwidth} for name, link in levels.items()}
    (tmp_path / "links.json").write_text(json.dumps({"schema": SCHEMA, "memory_bandwidth": 1e12, "levels": stored}))
    with redirect_stdout(io.StringIO()) as output:
        assert main(command.arguments[2:]) == 0
    # On 48 nodes of Frontier, quantized updates share the products of Muon, as the page states.
    assert "Compress: yes" in output.getvalue()


def test_documented_kernel_bytes_match_the_script() -> None:
    rows = [row for row in kernel_table({}).splitlines() if row.startswith("| llama")]
    assert len(rows) == 6 and all(row in read("docs/explanation/kernels.md") for row in rows)


SHORT = ["--training.steps=1", "--training.seq_len=32", "--validation.seq_len=32", "--validation.steps=1"]


def short_runs() -> Iterator[tuple[dict[str, str], list[str]]]:
    """Return the variables and arguments of every distinct run, reduced to one step with short sequences on this host,
    or to a dry run if the recipe's tokenizer or text is not available."""
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
    """Return a run's arguments, after running the documented command that prepares its data in `folder`."""
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
def test_documented_runs_succeed(variables: dict[str, str], arguments: list[str], tmp_path: Any) -> None:
    arguments = with_its_data(arguments, tmp_path / "data")
    # A run would continue from the checkpoints that an earlier one has left in a folder of the machine.
    arguments = [re.sub(r"(?<=checkpoint\.folder=)/(var/tmp|dev/shm|tmp)\b", str(tmp_path), each) for each in arguments]
    environment = os.environ | {"PYTHON": server.python(), "NGPU": "2", "OMP_NUM_THREADS": "1"} | variables
    command = [str(ROOT / "run_train.sh"), *arguments, f"--job.dump_folder={tmp_path}"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    assert ("Dry run: everything was built" if "COMM_MODE" in variables else "Summary of 1 steps") in output


# ---------------------------------------------------------------------------------------------- Python


def run_page(codes: list[str], folder: str) -> float | None:
    """Run the Python of a page in `folder`, in one namespace, as a rank of two; return its last loss if it has one."""
    scope: dict[str, Any] = {"__name__": "page"}
    torch.manual_seed(dist.get_rank())
    with (
        patch.dict(METHODS),
        contextlib.chdir(folder),
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
    ):
        for code in codes:
            exec(compile(code, "page", "exec"), scope)
    if "model" in scope:
        weights = torch.cat([p.detach().view(-1) for p in scope["model"].parameters()])
        gathered = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, weights)
        assert all(torch.equal(weights, other) for other in gathered)
    return float(scope["loss"]) if "loss" in scope else None


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_documented_python_code_runs(page: str, pool2: Pool, tmp_path: Path) -> None:
    losses = pool2(run_page, blocks(page, "python"), str(tmp_path))
    assert all(loss is None or loss < 1.0 for loss in losses)


def test_some_pages_contain_python_code() -> None:
    assert {page for page in PAGES if blocks(page, "python")} >= {
        "docs/getting_started/own_loop.md",
        "docs/how_to/add_a_method.md",
    }


METHOD = "docs/how_to/add_a_method.md"


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_documented_method_satisfies_the_contract(replicas: int) -> None:
    """With the line that the page adds to the contract test."""
    scope: dict[str, Any] = {"__name__": "page", "Case": test_contract.Case}
    (line,) = (code for code in blocks(METHOD, "") if code.startswith("Case("))
    with patch.dict(METHODS):
        exec(blocks(METHOD, "python")[0], scope)
        case = eval(line.rstrip(",\n"), scope)
        test_contract.test_applied_plus_pending_equals_the_sum_of_gradients(case, replicas)
        test_contract.test_sent_bytes_equal_the_planned_bytes(case, replicas)
        test_contract.test_the_dense_limit_equals_dense_training(case)
        test_contract.test_a_skipped_step_changes_no_state(case)
        test_contract.test_a_full_exchange_leaves_no_residual(case)
        test_contract.test_declared_states_determine_all_later_steps(case, 4)


def test_the_documented_method_trains_and_resumes_in_a_screen_of_code() -> None:
    """The run on the page, from its checkpoint on, has the bits of the uninterrupted one, and the planned bytes."""
    codes, scope = blocks(METHOD, "python"), {"__name__": "page"}
    assert len(codes[0].splitlines()) <= 60
    with patch.dict(METHODS):
        for code in codes:
            exec(code, scope)
        model, optimizer = scope["build"]()
        for loaded, saved in zip((model, optimizer), scope["saved"], strict=True):
            loaded.load_state_dict(saved)
        optimizer.collectives.ledger.sent.clear()
        assert scope["train"](model, optimizer, range(50, 100)) == scope["loss"] < 0.5
    assert all(map(torch.equal, model.parameters(), scope["model"].parameters()))
    sent = optimizer.collectives.ledger.sent_by_level_and_kind()
    payload = sum(nbytes for (_, kind), nbytes in sent.items() if kind == "payload")
    assert payload == pytest.approx(50 * optimizer.planned_bytes()) and 0 < payload < 50 * optimizer.dense_bytes() / 3

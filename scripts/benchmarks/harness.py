"""Commands of the benchmarks: measure, store the facts in facts.json, and render table.md from them."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from scripts.common import RESULTS, ROOT, RunError, command_of, guarded, parser, read, versions, write
from torchtitan_scape.core.patching import replaced

REQUEST = "SCAPE_BENCHMARK_REQUEST"  # environment variable with the request for the ranks, as JSON
# Options of a trainer that only trains.
QUIET = ("--metrics.no-enable-tensorboard", "--validation.no-enable")


@dataclass(frozen=True)
class Benchmark:
    """A measurement with a command of its own.

    Args:
        measure: returns the facts, from the parsed arguments and further ones for the trainer.
        table: renders the facts as a section of table.md; None if they are only stored and printed.
        arguments: of the command, as `add_argument` takes them.
        takes_trainer_options: whether further arguments are allowed.
    """

    measure: Callable[[argparse.Namespace, list[str]], dict[str, Any]]
    table: Callable[[dict[str, Any]], str] | None
    arguments: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    takes_trainer_options: bool = False


def main(module: str, doc: str | None, benchmarks: Mapping[str, Benchmark], rank: Callable[[Any], Any] = dict) -> int:
    """Run one of a module's benchmarks, and store its facts in results/MODULE beside those of the others.

    A module with one benchmark has no names in its command. `rank` measures in `measure_in_ranks`.
    """
    if REQUEST in os.environ:
        request = json.loads(os.environ[REQUEST])
        found = rank(request)
        if os.environ["RANK"] == "0":
            write(Path(request["folder"], "answer.json"), found)
        return 0
    own = parser(doc)
    commands = own.add_subparsers(required=True, dest="name") if len(benchmarks) > 1 else None
    for name, one in benchmarks.items():
        command = commands.add_parser(name, allow_abbrev=False) if commands else own
        command.set_defaults(name=name)
        for flag, options in one.arguments.items():
            command.add_argument(flag, **options)
        folder = RESULTS / module.rpartition(".")[2]
        command.add_argument("--output", type=Path, default=folder, help="folder of the results")
        command.add_argument("--report", action="store_true", help="only render the facts that are stored")
    args, rest = own.parse_known_args()
    if rest and not benchmarks[args.name].takes_trainer_options:
        own.error(f"unknown arguments: {' '.join(rest)}")
    return guarded(lambda: _run(module, benchmarks, args, rest), "stopped; what was running is removed")


def _run(module: str, benchmarks: Mapping[str, Benchmark], args: argparse.Namespace, rest: list[str]) -> None:
    path, one = args.output / "facts.json", benchmarks[args.name]
    if args.report:
        stored = json.loads(path.read_text())
        if args.name not in stored:
            raise ValueError(f"{path} has no facts of {args.name}; measure them first, without --report")
    else:
        facts = {"command": command_of(module), "versions": versions(), **one.measure(args, rest)}
        if os.environ.get("RANK", "0") != "0":  # under torchrun
            return
        stored = (read(path) or {}) | {args.name: facts}
        write(path, stored)
    print(one.table(stored[args.name]) if one.table else json.dumps(stored[args.name], indent=1))
    if texts := tables(benchmarks, stored):
        write(args.output / "table.md", f"# Results of `python -m {module}`\n\n" + "\n".join(texts))


def tables(benchmarks: Mapping[str, Benchmark], stored: Mapping[str, Any]) -> list[str]:
    """Return the sections of table.md."""
    return [one.table(stored[name]) for name, one in benchmarks.items() if one.table and name in stored]


def train(trainer: Any) -> None:
    """Run a trainer to its end, without TorchTitan's pause for the other ranks."""
    with replaced(time, "sleep", lambda seconds: None):
        trainer.train()


def measure_in_ranks(module: str, ranks: int, folder: str, request: Mapping[str, Any]) -> Any:
    """Start `module` on CPU ranks of this host, and return the measurements of its rank 0.

    Raises:
        RunError: A rank failed; the message has the end of the log.
    """
    command = [sys.executable, "-m", "torchtitan_scape.runtime.launch", f"--nproc_per_node={ranks}"]
    command += ["--rdzv_backend=launchers", "--rdzv_endpoint=localhost:0", "-m", module]
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    environment[REQUEST] = json.dumps({**request, "folder": folder})
    log = Path(folder, "log")
    with open(log, "wb") as file:
        code = subprocess.run(command, cwd=ROOT, env=os.environ | environment, stdout=file, stderr=file).returncode
    if code:
        raise RunError(f"{module} ended with exit code {code}:\n{log.read_text(errors='replace')[-3000:]}")
    return read(Path(folder, "answer.json"))


def seconds_of(work: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    """Return the seconds of a call, with the device's work."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    begin = time.perf_counter()
    work(*arguments, **options)
    wait()
    return time.perf_counter() - begin


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, called in a process of its own: it may create process groups."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()

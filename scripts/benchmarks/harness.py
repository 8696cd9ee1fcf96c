"""Commands of the benchmarks: measure, store the facts as JSON, and render table.md from them."""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from scripts.common import RESULTS, command_of, guarded, parser, read, torchrun, versions, write
from torchtitan_scape.core.patching import replaced

REQUEST = "SCAPE_BENCHMARK_REQUEST"  # environment variable with the request for the ranks, as JSON
# Options of a trainer that only trains.
QUIET = ("--metrics.no-enable-tensorboard", "--validation.no-enable", "--sample.characters=0")


@dataclass(frozen=True)
class Benchmark:
    """A measurement with a command of its own.

    Args:
        folder: of the results, below results/.
        measure: returns the facts, from the parsed arguments and further ones for the trainer.
        table: renders the facts.
        file: of the facts; "" if they are not stored.
        page: of the table; "" if it is only printed.
        arguments: of the command, as `add_argument` takes them.
        takes_trainer_options: whether further arguments are allowed.
    """

    folder: str
    measure: Callable[[argparse.Namespace, list[str]], dict[str, Any]]
    table: Callable[[dict[str, Any]], str]
    file: str = "runs.json"
    page: str = "table.md"
    arguments: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    takes_trainer_options: bool = False


def main(module: str, doc: str | None, benchmarks: Mapping[str, Benchmark], rank: Callable[[Any], Any] = dict) -> int:
    """Run a module's benchmarks by name; a single one has the name "". `rank` measures in `measure_in_ranks`."""
    if REQUEST in os.environ:
        request = json.loads(os.environ[REQUEST])
        found = rank(request)
        if os.environ["RANK"] == "0":
            write(Path(request["folder"], "answer.json"), found)
        return 0
    own = parser(doc)
    commands = own.add_subparsers(required=True) if "" not in benchmarks else None
    for name, one in benchmarks.items():
        command = commands.add_parser(name, allow_abbrev=False) if commands else own
        command.set_defaults(benchmark=one)
        for flag, options in one.arguments.items():
            command.add_argument(flag, **options)
        command.add_argument("--output", type=Path, default=RESULTS / one.folder, help="folder of the results")
        if one.file:
            command.add_argument("--report", action="store_true", help="only render the facts that are stored")
    args, rest = own.parse_known_args()
    if rest and not args.benchmark.takes_trainer_options:
        own.error(f"unknown arguments: {' '.join(rest)}")
    return guarded(lambda: _run(module, args, rest), "stopped; what was running is removed")


def _run(module: str, args: argparse.Namespace, rest: list[str]) -> None:
    one: Benchmark = args.benchmark
    if one.file and args.report:
        facts = json.loads((args.output / one.file).read_text())
    else:
        facts = {"command": command_of(module), "versions": versions(), **one.measure(args, rest)}
        if os.environ.get("RANK", "0") != "0":  # under torchrun
            return
        if one.file:
            write(args.output / one.file, facts)
    if one.page:
        write(args.output / one.page, one.table(facts))
    print(one.table(facts))


def train(trainer: Any) -> None:
    """Run a trainer to its end, without TorchTitan's pause for the other ranks."""
    with replaced(time, "sleep", lambda seconds: None):
        trainer.train()


def measure_in_ranks(module: str, ranks: int, folder: str, request: Mapping[str, Any]) -> Any:
    """Start `module` on CPU ranks of this host; return what its rank 0 has measured."""
    environment = {REQUEST: json.dumps({**request, "folder": folder}), "CUDA_VISIBLE_DEVICES": ""}
    torchrun(ranks, ["-m", module], Path(folder, "log"), **environment)
    return read(Path(folder, "answer.json"))


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, called in a process of its own: it may create process groups."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()

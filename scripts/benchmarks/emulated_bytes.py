"""What benchmarks of bytes on an emulated cluster share: a run of the trainer there, and their two commands."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.common import EMBEDDED, OUTPUTS, RESULTS, RunError, command_of, guarded, parser, write
from scripts.emulated_cluster import Cluster

Stored = Mapping[str, Any]


def train(
    nodes: int, ranks_per_node: int, options: Sequence[str], kept: Sequence[str], folder: Path, timeout: float
) -> dict[str, Any]:
    """Some steps of the embedded recipe, dump and logs in `folder`; the options, and what is to be kept of its summary.

    Links are not limited. Raises RunError where the run fails, or counts nothing on the interfaces.
    """
    (folder / "summary.json").unlink(missing_ok=True)
    given = ["-m", "torchtitan_scape.train", f"--job.config_file={EMBEDDED}", f"--job.dump_folder={folder}"]
    given += ["--sample.characters=0", *options]
    with Cluster(nodes) as cluster:
        cluster.torchrun(given, ranks_per_node, folder, timeout)
    summary = json.loads((folder / "summary.json").read_text())
    if summary["interfaces"] is None or summary["skipped_steps"]:
        raise RunError(f"{folder.name} has measured nothing, or skipped steps; its logs are in {folder}")
    return {"options": list(options), **{key: summary[key] for key in kept}}


def main(
    name: str,
    doc: str | None,
    run: Callable[[int, Path, float], dict[str, Any]],
    table: Callable[[Stored], str],
    results: str,
    steps: int,
) -> int:
    """The commands "run" and "report" of the benchmark of this name; its exit code.

    run: of (steps of a run, folder for logs, seconds after which a run is ended), all runs as runs.json has them.
    table: table.md, from runs.json. results: the folder of both. steps: by default.
    """

    def report(args: argparse.Namespace) -> None:
        text = table(json.loads((args.output / "runs.json").read_text()))
        write(args.output / "table.md", text)
        print(text)

    def run_all(args: argparse.Namespace) -> None:
        runs = run(args.steps, args.work.resolve(), args.timeout)
        write(args.output / "runs.json", {"command": command_of(f"scripts.benchmarks.{name}"), "runs": runs})
        report(args)

    own = parser(doc)
    commands = own.add_subparsers(dest="command", required=True)
    for command, work in (("run", run_all), ("report", report)):
        one = commands.add_parser(command)
        one.set_defaults(do=work)
        one.add_argument("--output", type=Path, default=RESULTS / results)
        if command == "run":
            one.add_argument("--steps", type=int, default=steps, help="of a run, 2 or more")
            one.add_argument("--timeout", type=float, default=300.0, help="seconds after which a run is ended")
            one.add_argument("--work", type=Path, default=OUTPUTS / name, help="logs of the runs")
    args = own.parse_args()
    return guarded(lambda: args.do(args), stopped="error: interrupted; the nodes are removed")

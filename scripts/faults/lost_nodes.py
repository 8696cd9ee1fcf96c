"""Kill nodes for good at random moments, and start them again later, in one run with NNODES=1:2.

    python -m scripts.faults.lost_nodes --kills 20

A node is a launcher and its rank; both are killed with SIGKILL, node 0 as often as node 1. The other node must continue
alone from the newest checkpoint, with twice the gradient accumulation, and take the node up when it starts again.
Afterwards some of the intervals between two restarts are repeated by a start by hand from the same checkpoint with the
same number of nodes; the next checkpoint must be equal in every bit. Writes lost_nodes.json and lost_nodes.md.
"""

import argparse
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.common import RESULTS, RunError, markdown, run_command, write
from scripts.faults.fault_runs import COMMON, Launch, PrivateFolders, differences, free_endpoint, kill_node
from torchtitan_scape.checkpoint.storage import is_finished

GLOBAL_BATCH = 2
ARGUMENTS = [
    *COMMON,
    *("--model.flavor=study", "--model.hf_assets_path=./torchtitan_scape/data/byte_tokenizer"),
    *("--training.local_batch_size=1", "--training.seq_len=32", "--training.steps=100000"),
    *("--lr_scheduler.warmup_steps=2", "--optimizer.lr=2e-4", "--sync.scape.block_size=64"),
    *("--sync.scape.density_warmup_steps=3", "--checkpoint.interval=10", "--checkpoint.keep_latest_k=0"),
]
START = re.compile(r"gradient accumulation steps (\d+),.*?Training starts at step (\d+)", re.DOTALL)
LIMIT_SECONDS = 600.0  # for a start, on a shared machine


class ElasticRun:
    """A run on one or two nodes.

    Args:
        folders: folders of the nodes; None if they share `folder`.

    Attributes:
        launch: its launchers.
        intervals: number of nodes and step of the checkpoint that each start resumed from.
    """

    def __init__(
        self, folder: Path, arguments: list[str], last_call: int = 30, folders: PrivateFolders | None = None
    ) -> None:
        environment = {
            "NNODES": "1:2",
            "RDZV_ENDPOINT": free_endpoint(),
            "PET_RDZV_CONF": f"last_call_timeout={last_call}",
        }
        self.folders, start = folders, None if folders is None else folders.start
        self.launch = Launch(arguments, folder, 2, 1, environment, start)
        self.intervals: list[tuple[int, int]] = []
        self._seen = [0, 0]
        self.wait_for_start([0, 1])

    def _starts(self, node: int) -> list[tuple[int, int]]:
        """Return the number of nodes and the step before each start of a node's rank."""
        return [(GLOBAL_BATCH // int(a), int(s) - 1) for a, s in START.findall(self.launch._outputs()[node])]

    def wait_for_start(self, nodes: list[int]) -> int:
        """Wait until these nodes train together; return the number of further starts in between."""

        def together() -> bool:
            starts = [self._starts(node) for node in nodes]
            new = all(len(s) > self._seen[node] for s, node in zip(starts, nodes, strict=True))
            return new and {s[-1] for s in starts} == {(len(nodes), starts[0][-1][1])}

        self.launch.wait_until(together, LIMIT_SECONDS, f"a start of nodes {nodes}", every=0.2)
        extra = max(len(self._starts(node)) - self._seen[node] for node in nodes) - 1
        self.intervals.append(self._starts(nodes[0])[-1])
        self._seen = [len(self._starts(node)) for node in (0, 1)]
        return extra

    def kill(self, node: int) -> None:
        """Kill a node's launcher and rank, which do not return. A folder of its own is lost with it."""
        kill_node(self.launch, node)
        if self.folders is not None:
            shutil.rmtree(self.folders.of(node))

    def start_again(self, node: int) -> None:
        self.launch.launchers[node] = self.launch.start(node)


def one_kill(run: ElasticRun, dice: random.Random) -> dict[str, Any]:
    """Lose a node and take it up again; return the row of the table."""
    time.sleep(dice.uniform(0.0, 8.0))
    victim = dice.choice((0, 1))
    reached = max(run.launch.steps())
    run.kill(victim)
    begin = time.monotonic()
    extra = run.wait_for_start([1 - victim])
    alone = time.monotonic() - begin
    time.sleep(dice.uniform(0.0, 8.0))
    begin = time.monotonic()
    run.start_again(victim)
    extra += run.wait_for_start([0, 1])
    return {
        "node": victim,
        "step reached": reached,
        "alone from step": run.intervals[-2][1],
        "steps repeated": reached - run.intervals[-2][1],
        "seconds to continue": round(alone),
        "both from step": run.intervals[-1][1],
        "seconds to join": round(time.monotonic() - begin),
        "further restarts": extra,
    }


def repeated_by_hand(folder: Path, arguments: list[str], interval: int, run: ElasticRun, scratch: Path) -> list[str]:
    """Repeat the training between two restarts by a start by hand; return the tensors that differ at its end."""
    (nodes, first), (_, last) = run.intervals[interval : interval + 2]
    target = f"checkpoint/step-{last}"
    if first:
        shutil.copytree(folder / f"checkpoint/step-{first}", scratch / f"checkpoint/step-{first}")
    by_hand = [*arguments, "--checkpoint.interval=1", f"--training.global_batch_size={GLOBAL_BATCH}"]
    with Launch(by_hand, scratch, nodes=nodes, ranks_per_node=1) as manual:
        manual.wait_until(lambda: is_finished(scratch / target), LIMIT_SECONDS, target)
    return differences(folder / target, scratch / target, scratch)


def table(rows: list[dict[str, Any]], checked: list[dict[str, Any]], steps: int) -> str:
    equal = sum(row["equal to the last bit"] for row in checked)
    cells = [
        {k: {True: "yes", False: "no"}[v] if isinstance(v, bool) else v for k, v in row.items()} for row in checked
    ]
    return f"""# Nodes lost for good

One run of {steps} steps with NNODES=1:2 (`python -m scripts.faults.lost_nodes`) lost a node {len(rows)} times and \
continued each time, on two CPU cores that others used as well.

{markdown(rows)}

{equal} of {len(checked)} intervals between two restarts, repeated by hand from the same checkpoint with the same \
number of nodes, end with a checkpoint that is equal in every bit.

{markdown(cells)}
"""


def run(args: argparse.Namespace) -> int:
    if args.kills < 1:
        raise ValueError(f"--kills is {args.kills}; it must be 1 or more")
    dice, rows, checked = random.Random(args.seed), [], []
    scratch = Path(tempfile.mkdtemp(prefix="scape-nodes-"))
    folder = scratch / "run"
    elastic = ElasticRun(folder, ARGUMENTS)
    with elastic.launch:
        for _ in range(args.kills):
            rows.append(one_kill(elastic, dice))
            print(rows[-1], flush=True)
        steps = elastic.launch.steps()
    if missing := set(range(1, max(steps) + 1)) - set(steps):
        raise RunError(f"steps were not trained: {sorted(missing)}")
    pairs = zip(elastic.intervals, elastic.intervals[1:], strict=False)
    possible = [i for i, ((_, first), (_, last)) in enumerate(pairs) if last > first]
    for interval in sorted(dice.sample(possible, min(args.repeat, len(possible)))):
        by_hand = scratch / f"by-hand-{interval}"
        different = repeated_by_hand(folder, ARGUMENTS, interval, elastic, by_hand)
        (nodes, first), (_, last) = elastic.intervals[interval : interval + 2]
        checked.append({"nodes": nodes, "from": first, "to": last, "equal to the last bit": not different})
        print(checked[-1], different[:3], flush=True)
        shutil.rmtree(by_hand)
    write(args.output / "lost_nodes.json", {"kills": rows, "intervals": checked, "steps": max(steps)})
    write(args.output / "lost_nodes.md", table(rows, checked, max(steps)))
    shutil.rmtree(scratch)
    return 0 if all(row["equal to the last bit"] for row in checked) else 1


if __name__ == "__main__":
    options = {
        "--kills": dict(type=int, default=20),
        "--repeat": dict(type=int, default=6, help="intervals to repeat by hand"),
        "--seed": dict(type=int, default=0),
        "--output": dict(type=Path, default=RESULTS / "faults"),
    }
    sys.exit(run_command(__doc__, run, options))

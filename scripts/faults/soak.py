"""Train the embedded recipe on an emulated cluster with a fault every minute. Needs root and iproute2.

    python -m scripts.faults.soak --minutes 60
    python -m scripts.faults.soak --minutes 60 -- --sync.method=diloco

Arguments after "--" go to the trainer. Ranks and launchers are killed and halted, links fail, the job is stopped and
started. Launchers restart their ranks; this script restarts launchers, as a scheduler would. A run without faults
then trains to the same step, and the losses of all steps are compared. Writes soak.md and soak.json, by command.
"""

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.common import RESULTS, RunError, command_of, markdown, read, run_command, write
from scripts.emulated_cluster import Cluster
from scripts.faults.fault_runs import COMMON, Launch

EVERY_SECONDS = 60.0  # between faults, from the end of one on
TIMEOUT_SECONDS = 20.0  # of collectives
WAIT_SECONDS = 600.0  # for training to continue, on a shared machine
ARGUMENTS = [
    *COMMON,
    *("--training.local_batch_size=2", "--training.seq_len=128", "--training.steps=100000"),
    *("--lr_scheduler.warmup_steps=20", "--checkpoint.interval=10"),
    f"--comm.train_timeout_seconds={TIMEOUT_SECONDS:.0f}",
]


class Soak:
    """A run on a cluster, and its faults."""

    def __init__(self, cluster: Cluster, folder: Path, dice: random.Random, arguments: list[str]) -> None:
        self.cluster, self.dice = cluster, dice
        self.run = Launch([*ARGUMENTS, *arguments], folder, cluster.nodes, 1, {"MAX_RESTARTS": "5"}, cluster.start)

    def rank(self) -> int:
        return self.dice.choice(sorted(self.run.ranks().values()))

    def node(self) -> int:
        return self.dice.randrange(self.cluster.nodes)

    def halt_a_rank(self, seconds: float) -> None:
        pid = self.rank()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def link_down(self, seconds: float) -> None:
        node = self.node()
        self.cluster.set_link(node, up=False)
        time.sleep(seconds)
        self.cluster.set_link(node, up=True)

    def ask_to_stop(self) -> None:
        self.run.launchers[self.node()].send_signal(signal.SIGUSR1)
        if (codes := self.run.wait(WAIT_SECONDS)) != [75] * self.cluster.nodes:
            raise RunError(f"asked to stop, the launchers ended with {codes}, not 75:\n{self.run.output()[-3000:]}")

    def losses(self) -> dict[int, str]:
        """Return the loss of each step, as last printed."""
        return {int(step): loss for step, loss in re.findall(r" step: +(\d+)  loss: +(\S+)", self.run.output())}

    def inject(self, kind: str) -> dict[str, Any]:
        """Inject a fault, and wait until training has continued for five steps; return the row of the table."""
        begin, starts, reached = time.monotonic(), self.run.starts(), max(self.run.steps(), default=0)
        restarts, inject = FAULTS[kind]
        inject(self)
        seen = len(self.run.steps())
        ended: list[int] = []

        def goes_on() -> bool:
            for node, process in enumerate(self.run.launchers):
                if (code := process.poll()) is not None:
                    ended.append(code)
                    if code in (2, 4) or len(ended) > 10:
                        raise RunError(f"the launcher of node {node} ended with {code}")
                    self.run.launchers[node] = self.run.start(node)
            if restarts and self.run.starts() <= starts:
                nonlocal seen
                seen = len(self.run.steps())
                return False
            return len(self.run.steps()) >= seen + 5 * self.cluster.nodes

        try:
            deadline = time.monotonic() + WAIT_SECONDS
            while not goes_on():
                if time.monotonic() > deadline:
                    raise RunError(f"training did not go on within {WAIT_SECONDS:g} s")
                time.sleep(0.2)
            survived, why = True, ""
        except RunError as error:
            survived, why = False, str(error)
        restarted = self.run.starts() > starts
        if restarted and not restarts:
            why = "the run was started again"
        return {
            "fault": kind,
            "survived": survived and restarted == restarts,
            "step reached": reached,
            "steps taken again": max(0, reached - self.run.resumed_at()[-1] + 1) if restarted else 0,
            "started again": restarted,
            "launchers started by hand": len(ended),
            "seconds until it went on": round(time.monotonic() - begin, 1),
            "why not": why,
        }

    def stop(self) -> None:
        """Request a stop and wait for it; then end the launchers."""
        for process in self.run.launchers:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        try:
            self.run.wait(WAIT_SECONDS)
        finally:
            self.run.__exit__()


# Whether the ranks must restart after a fault, and its injection.
FAULTS: dict[str, tuple[bool, Callable[[Soak], None]]] = {
    "kill a rank": (True, lambda soak: os.kill(soak.rank(), signal.SIGKILL)),
    "kill a launcher": (True, lambda soak: soak.run.launchers[soak.node()].kill()),
    "halt a rank for good": (True, lambda soak: os.kill(soak.rank(), signal.SIGSTOP)),
    "link down beyond the timeout": (True, lambda soak: soak.link_down(2 * TIMEOUT_SECONDS)),
    "ask to stop and start again": (True, Soak.ask_to_stop),
    "halt a rank for 5 s": (False, lambda soak: soak.halt_a_rank(5.0)),
    "link down for 3 s": (False, lambda soak: soak.link_down(3.0)),
}


def section(command: str, facts: dict[str, Any]) -> str:
    rows, steps = facts["faults"], facts["steps"]
    lines = []
    for kind in dict.fromkeys(row["fault"] for row in rows):
        own = [row for row in rows if row["fault"] == kind]
        seconds = [row["seconds until it went on"] for row in own]
        line = {"fault": kind, "tried": len(own)}
        line |= {key: sum(row[key] for row in own) for key in ("survived", "started again")}
        line["steps taken again, at most"] = max(row["steps taken again"] for row in own)
        line["seconds to go on: mean, at most"] = f"{sum(seconds) / len(seconds):.0f}, {max(seconds):.0f}"
        lines.append(line)
    survived = sum(row["survived"] for row in rows)
    return f"""{steps} steps of the embedded recipe with {len(rows)} faults, {survived} of them survived (`{command}`).
Loss at step {steps}: {facts["loss"]}; without faults: {facts["undisturbed"]}; steps whose losses differ in any digit
shown: {len(facts["different"])}.

{markdown(lines)}
"""


def run(args: argparse.Namespace) -> int:
    scratch, dice = Path(tempfile.mkdtemp(prefix="scape-soak-")), random.Random(0)
    rows, deck = list[dict[str, Any]](), list[str]()
    end = time.monotonic() + 60 * args.minutes
    with Cluster(args.nodes) as cluster:
        soak = Soak(cluster, scratch / "run", dice, args.arguments)
        soak.run.wait_until(lambda: len(soak.run.steps()) >= 5, WAIT_SECONDS, "the first steps")
        while time.monotonic() < end and all(row["survived"] for row in rows):
            time.sleep(EVERY_SECONDS * dice.uniform(0.5, 1.5))
            deck = deck or dice.sample(list(FAULTS), len(FAULTS))
            rows.append(soak.inject(deck.pop()))
            print(rows[-1], flush=True)
        soak.stop()
        losses = soak.losses()
        steps = max(losses)
        print(f"{steps} steps; now without faults", flush=True)
        calm = Soak(cluster, scratch / "calm", dice, args.arguments)
        calm.run.wait_until(lambda: max(calm.run.steps(), default=0) >= steps, 120 * 60 * args.minutes, "the end")
        calm.stop()
        undisturbed = calm.losses()
    different = [step for step, loss in losses.items() if undisturbed[step] != loss]
    facts = {"faults": rows, "steps": steps, "loss": losses[steps], "undisturbed": undisturbed[steps]}
    command = command_of("scripts.faults.soak")
    stored = (read(args.output / "soak.json") or {}) | {command: facts | {"different": different}}
    write(args.output / "soak.json", stored)
    write(args.output / "soak.md", "# Soak tests\n\n" + "\n".join(section(*one) for one in stored.items()))
    shutil.rmtree(scratch)
    print(section(command, stored[command]))
    return 0 if not different and all(row["survived"] for row in rows) else 1


if __name__ == "__main__":
    arguments = {
        "--minutes": dict(type=float, default=60.0, help="with faults; the run without comes on top"),
        "--nodes": dict(type=int, default=2),
        "--output": dict(type=Path, default=RESULTS / "faults"),
        "arguments": dict(nargs="*", help="of the trainer, after --"),
    }
    sys.exit(run_command(__doc__, run, arguments))

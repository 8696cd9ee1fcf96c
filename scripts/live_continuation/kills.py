"""Kill replicas of a run at random moments; the others continue without a restart, and the lost ones join later.

    python -m scripts.live_continuation.kills --kills 12

A prototype outside of the product: a small GPT, an own loop, replicas of one process each on this machine. One run has
no kills, and one loses one or two replicas with SIGKILL: between two steps, in an exchange, or before the vote on its
result. Both train the same number of batches, those of lost rounds not counted. The checks: every batch was trained
once, and no step of a replica that was not killed was lost. Writes live_continuation_METHOD.json and .md; a stored run
is not repeated.
"""

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.common import RESULTS, ROOT, RunError, command_of, markdown, read, run_command, versions, write
from scripts.live_continuation.membership import Coordinator

MOMENTS = ("step", "exchange", "vote")
LIMIT_SECONDS = 600.0  # for a start or a round, on a shared machine
Event = dict[str, Any]
Row = dict[str, Any]


class LiveRun:
    """The processes of a run and their events.

    Attributes:
        events: of all replicas, as they were read.
        killed: names of the replicas that were killed, and when.
    """

    def __init__(self, folder: Path, replicas: int, arguments: Sequence[str], python: str = sys.executable) -> None:
        names = [f"{number}.0" for number in range(replicas)]
        self._folder, self._arguments, self._python = folder, arguments, python
        self._coordinator = Coordinator(names)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._read: dict[str, int] = {}
        self.events: list[Event] = []
        self.killed: dict[str, float] = {}
        for name in names:
            self.start(name)

    def start(self, name: str, joins: bool = False) -> None:
        ports = map(str, self._coordinator.ports)
        command = [self._python, "-m", "scripts.live_continuation.replica", name, *ports, *self._arguments]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with open(self._folder / f"{name}.jsonl", "wb") as out:
            self._processes[name] = subprocess.Popen(
                command + ["--joins"] * joins, cwd=ROOT, env=environment, stdout=out, stderr=out
            )
        self._read[name] = 0

    def __enter__(self) -> "LiveRun":
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def alive(self) -> list[str]:
        return [name for name in self._processes if name not in self.killed]

    def update(self) -> None:
        """Read the new events. Raises RunError if a replica has failed."""
        for name in self._processes:
            content = (self._folder / f"{name}.jsonl").read_bytes()
            complete = content[self._read[name] : content.rfind(b"\n") + 1]
            self._read[name] += len(complete)
            self.events += [json.loads(line) for line in complete.splitlines() if line.startswith(b"{")]
            if name in self.alive() and self._processes[name].poll():
                raise RunError(f"replica {name} has failed:\n{content.decode(errors='replace')[-2000:]}")

    def of(self, event: str, name: str | None = None, after: float = 0.0) -> list[Event]:
        found = [e for e in self.events if e["event"] == event and e["time"] > after]
        return [e for e in found if name in (None, e["name"])]

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        begin = time.monotonic()
        while not condition():
            if time.monotonic() - begin > LIMIT_SECONDS:
                raise RunError(f"{what} did not happen within {LIMIT_SECONDS:.0f} s")
            time.sleep(0.02)
            self.update()

    def wait_for_batches(self, trained: float) -> None:
        """Wait until the displacements of so many batches were applied, or the run has ended."""
        self.wait_until(lambda: self.of("end") or self.trained() >= trained, f"batch {trained:.0f}")

    def trained(self) -> int:
        return max((e["trained"] for e in self.of("exchanged")), default=0)

    def stop(self) -> None:
        """End the run after the next exchange."""
        self._coordinator.store.set("stop", "")

    def wait(self) -> None:
        """Wait for the end of the replicas that were not killed."""
        while any(self._processes[name].poll() is None for name in self.alive()):
            time.sleep(0.1)
            self.update()
        self.update()

    def kill(self, names: Sequence[str], moment: str) -> float:
        """Kill replicas and return when the first one died. In an exchange they send the signal to themselves."""
        self.killed |= dict.fromkeys(names, 0.0)
        if moment == "step":
            for name in names:
                self.killed[name] = time.monotonic()
                self._processes[name].send_signal(signal.SIGKILL)
        else:
            for name in names:
                self._coordinator.store.set(f"dies/{name}", moment)
            self.wait_until(lambda: all(self.of("dies", name) for name in names), f"the end of {names}")
            self.killed |= {name: self.of("dies", name)[0]["time"] for name in names}
        return min(self.killed[name] for name in names)


def one_loss(run: LiveRun, moment: str, count: int, dice: random.Random) -> Row:
    """Kill replicas, wait for the others' next exchange, start new ones in their place; return the row of the table."""
    victims = sorted(dice.sample(run.alive(), count))
    others = [name for name in run.alive() if name not in victims]
    lost = run.kill(victims, moment)
    run.wait_until(lambda: all(run.of("exchanged", name, lost) for name in others), "an exchange of the others")
    run.wait_until(lambda: run.of("end") or all(run.of("step", name, lost) for name in others), "their next step")
    exchanged = max((run.of("exchanged", name, lost)[0] for name in others), key=lambda e: e["time"])
    steps = [run.of("step", name, lost)[:1] for name in others]
    new = [f"{slot}.{int(start) + 1}" for slot, start in (name.split(".") for name in victims)]
    for name in new:
        run.start(name, joins=True)
    run.wait_until(lambda: run.of("end") or all(run.of("step", name) for name in new), "a step of the new replicas")
    return {
        "moment": moment,
        "replicas left": f"{len(others)} of {len(others) + count}",
        "round": exchanged["round"],
        "attempts that failed": max(len(run.of("fails", name, lost)) for name in others),
        "seconds to the next step": max((e["time"] for found in steps for e in found), default=math.nan) - lost,
        "seconds to the next exchange": exchanged["time"] - lost,
        "seconds of that exchange": exchange_seconds(run)[exchanged["round"]],
        "joins": [join_of(run, name) for name in new if run.of("step", name)],
    }


def exchange_seconds(run: LiveRun) -> dict[int, float]:
    """Return, for each round, the time from the arrival of its last participant to the last applied result."""
    seconds = {}
    for number in {e["round"] for e in run.of("exchanged")}:
        done = [e for e in run.of("exchanged") if e["round"] == number]
        arrived = [e for e in run.of("arrives") if e["round"] == number - 1 and e["trained"]]
        seconds[number] = max(e["time"] for e in done) - max(
            e["time"] for e in arrived if e["name"] in done[0]["names"]
        )
    return seconds


def join_of(run: LiveRun, name: str) -> Row:
    """Return the times of a join: of the new replica, and of the others, who wait for it between two rounds."""
    formed, ready = run.of("formed", name)[0], run.of("ready", name)[0]["time"]
    exchanged = max(e["time"] for e in run.of("exchanged") if e["round"] == formed["round"])
    group = [e for e in run.of("regroups", name) if e["time"] < formed["time"]][-1]["seconds"]
    received = run.of("receives", name)[-1]
    return {
        "seconds of waiting for the round": exchanged - ready,
        "seconds to join": formed["time"] - exchanged,
        "of these for the group": group["group"],
        "for the optimizer": group["optimizer"],
        "for the state": received["seconds"],
        "MB": received["bytes"] / 1e6,
    }


def check(run: LiveRun) -> dict[str, int]:
    """Count the steps. Raises RunError if a batch was trained twice, or a step of a living replica was lost."""
    steps = run.of("step")
    trainers = {e["round"] - 1: set(e["names"]) for e in run.of("exchanged")}
    if len({e["batch"] for e in steps}) != len(steps):
        raise RunError("a batch was trained twice")
    dropped = [e for e in steps if e["name"] not in trainers.get(e["round"], ())]
    last = {e["name"]: e["round"] for e in steps}  # a replica that is killed may lose the steps of this round
    of_living = [e for e in dropped if e["name"] not in run.killed or e["round"] < last[e["name"]]]
    if of_living:
        raise RunError(f"{len(of_living)} steps of living replicas were lost, first {of_living[0]}")
    return {"steps": len(steps), "steps of killed replicas lost": len(dropped), "steps of others lost": len(of_living)}


def train(args: argparse.Namespace, kills: int, folder: Path) -> Row:
    """Run with so many losses of one or two replicas, and return its figures."""
    options = [f"--method={args.method}", f"--inner_steps={args.inner_steps}", f"--batches={args.batches}"]
    dice, rows = random.Random(args.seed), list[Row]()
    with LiveRun(folder, args.replicas, [*options, f"--seed={args.seed}"]) as run:
        for number in range(kills):
            run.wait_for_batches(max(1.0, args.batches * number / kills))
            time.sleep(dice.uniform(0.0, 3.0))
            run.update()
            if run.of("end"):
                break
            count = 2 if args.replicas > 2 and number % 4 == 3 else 1
            rows.append(one_loss(run, MOMENTS[number % 3], count, dice))
            print({key: value for key, value in rows[-1].items() if key != "joins"}, flush=True)
        run.wait()
        return figures_of(run, rows)


def figures_of(run: LiveRun, rows: list[Row]) -> Row:
    """Return the figures of a run that has ended. rows: its losses of replicas."""
    ends, steps, regroups, seconds = run.of("end"), run.of("step"), run.of("regroups"), exchange_seconds(run)
    disturbed = {row["round"] for row in rows}
    return {
        "kills": rows,
        "held-out loss": ends[0]["loss"],
        "replicas have the same loss": len({e["loss"] for e in ends}) == 1,
        "batches": ends[0]["trained"],
        "rounds": max(seconds),
        **check(run),
        "seconds of other exchanges": statistics.median(s for r, s in seconds.items() if r not in disturbed),
        "seconds of a rebuilt optimizer": statistics.median(e["seconds"]["optimizer"] for e in regroups),
        "CPU seconds of it": statistics.median(e["optimizer_cpu"] for e in regroups),
        "steps per second": len(steps) / (ends[0]["time"] - steps[0]["time"]),
    }


def spans(rows: Sequence[Row]) -> Row:
    """Return median, smallest and largest value of every column with times."""
    found = {}
    for key in rows[0] if rows else ():
        values = [row[key] for row in rows if isinstance(row[key], float) and math.isfinite(row[key])]
        if values:
            found[key] = f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
    return found


def _digits(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def report(command: str, args: argparse.Namespace, undisturbed: Row, killed: Row) -> str:
    rows = [{key: _digits(value) for key, value in row.items() if key != "joins"} for row in killed["kills"]]
    joins = [join for row in killed["kills"] for join in row["joins"]]
    moments = []
    for moment in (*MOMENTS, "all"):
        chosen = [row for row in killed["kills"] if moment in ("all", row["moment"])]
        moments.append({"moment": moment, "losses": len(chosen), **spans(chosen)})
    totals = [
        {"quantity": key, "undisturbed": _digits(undisturbed[key]), "with losses": _digits(value)}
        for key, value in killed.items()
        if key != "kills"
    ]
    return f"""# Live continuation with {args.method}

`{command}`: {args.replicas} replicas of one process each, {args.inner_steps} inner steps per round, a GPT of 237,184 \
parameters, batches of 8 x 64 bytes, gloo, all on the two CPU cores of one machine.

{markdown(totals)}

{len(rows)} losses of one or two replicas, seconds as median (smallest to largest):

{markdown(moments)}

{len(joins)} joins, as the new replica sees them; the others wait for the seconds to join:

{markdown([spans(joins)])}

Each loss:

{markdown(rows)}
"""


def main(args: argparse.Namespace) -> None:
    name = f"live_continuation_{args.method}" if args.kills else f"without_kills_{args.method}_{args.replicas}"
    record, command = args.output / f"{name}.json", command_of("scripts.live_continuation.kills")
    given = {key: value for key, value in vars(args).items() if key != "output"}
    found = read(record)
    if found is None or found["arguments"] != given:
        found = {"command": command, "arguments": given, "versions": versions()}
    for kind, kills in {"killed": args.kills, "undisturbed": 0}.items():
        if kind not in found and (kills or kind == "undisturbed"):
            with tempfile.TemporaryDirectory(prefix="scape-live-") as folder:
                found[kind] = train(args, kills, Path(folder))
            write(record, found)
    if args.kills:
        write(args.output / f"{name}.md", report(found["command"], args, found["undisturbed"], found["killed"]))


if __name__ == "__main__":
    options = {
        "--method": dict(default="diloco", choices=("diloco", "noloco")),
        "--kills": dict(type=int, default=12, help="0 for the run without kills alone"),
        "--replicas": dict(type=int, default=4),
        "--inner_steps": dict(type=int, default=20),
        "--batches": dict(type=int, default=7000, help="of all replicas, lost ones not counted"),
        "--seed": dict(type=int, default=0),
        "--output": dict(type=Path, default=RESULTS / "faults"),
    }
    sys.exit(run_command(__doc__, main, options))

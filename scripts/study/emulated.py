"""The launcher `emulated`: runs on network namespaces of this host, with measured links and predicted steps.

Settings of a set's `launch`:

    compute         "real", or seconds of forward and backward at the smallest size, in proportion less at larger ones
    rate            Mbit/s of a node's interface, each way; 0: no limit
    slowdown        chooses the rate: a step of the set's first method takes so many times its compute-only step
    ranks_per_node  1 by default
    plain           true: no FSDP around a model of one shard
    steps, warm_up  measured steps, and steps before them
    predict         false: no prediction, whose calibrations take longer than the run
    measure         "loss" or "bytes": trains the set's steps, not timed, for their validation loss or their bytes
    timeout         seconds of a run, 1200 by default
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.common import RunError, command_of, read, write
from scripts.emulated_cluster import Cluster
from scripts.study.costs import planned_run
from scripts.study.grid import BudgetSet, RunSpec
from scripts.study.queue import Queue
from scripts.study.special_tables import PLANNED
from scripts.study.store import SETUP
from scripts.study.timed import NEVER, PEERS_NOTE, TIMED, from_raw, medians, timing, wanted
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.models.registry import workload_of
from torchtitan_scape.planner.step import last_backward, predict_step
from torchtitan_scape.topology.machines import Links
from torchtitan_scape.topology.traffic import LevelSize

MACHINE = f"{os.cpu_count()} cores, gloo over TCP between network namespaces"


class EmulatedSet:
    """The runs of one set. Calibrations (links, passes, rate) are lines of the store."""

    def __init__(self, queue: Queue, one: BudgetSet) -> None:
        self.queue, self.one, self.store, self.launch = queue, one, queue.store, one.launch
        self.per_node = int(self.launch.get("ranks_per_node", 1))
        self.compute = str(self.launch.get("compute", "real"))
        self.real = self.compute == "real"
        self.rate: float | None = self.launch.get("rate") or None
        self.slowdown = float(self.launch.get("slowdown", 0))
        self.timeout = float(self.launch.get("timeout", 1200))
        self.specs = [spec for method in one.methods for spec in queue.grid.specs(one, method)]
        if any(size % self.per_node for size in one.sizes):
            raise ValueError(f"set {one.name!r}: ranks_per_node = {self.per_node} does not divide sizes = {one.sizes}")
        if not self.real and not self.compute.replace(".", "", 1).isdigit():
            raise ValueError(f"set {one.name!r}: compute = {self.compute!r}; give seconds, or real")
        overlapping = [s.method for s in self.specs if "peer" in s.about or s.options.get("sync.overlap")]
        if overlapping and not self.real:
            names = ", ".join(dict.fromkeys(overlapping))
            raise ValueError(f'set {one.name!r}: {names} exchange during the backward pass and need compute = "real"')
        if self.slowdown and not (self.slowdown > 1 and self.real and len(one.sizes) == 1):
            raise ValueError(f'set {one.name!r}: slowdown needs a factor above 1, compute = "real" and one size')
        if "measure" not in self.launch:
            if self.slowdown and not self.rate:
                self.rate = self.calibrated_rate()
            setup = {"launcher": "emulated", "machine": MACHINE, "notes": self.notes()}
            self.store.note(SETUP, one.name, {}, setup, command_of("scripts.study"))

    def start(self, size: int, arguments: list[str], log: Path, rate: float | None, **env: str) -> None:
        """Run torchrun's arguments on all nodes. Raises RunError."""
        with Cluster(size // self.per_node, rate) as cluster:
            cluster.torchrun(arguments, self.per_node, log, self.timeout, env)

    def arguments(self, spec: RunSpec, log: Path, steps: int = 0) -> list[str]:
        """Return the trainer's command line; with `steps`, of a timed run."""
        found = [*spec.arguments, f"--job.dump_folder={log}"]
        if steps:
            found += [f"--training.steps={steps}", f"--metrics.log_freq={NEVER}", f"--validation.freq={NEVER}"]
            found += ["--comm.train_timeout_seconds=900", "--debug.seed=0"]
        if not self.real:  # only the first step computes
            found += ["--training.local_batch_size=1", f"--training.global_batch_size={spec.size}"]
            found += ["--validation.local_batch_size=1", "--validation.steps=1"]
        return found

    def timed(self, spec: RunSpec, steps: int, rate: float | None, name: str, **more: Any) -> Path:
        """Train `steps` steps; return the file of the measurement. `more` goes to the ranks. Raises RunError."""
        log = self.queue.work / name
        raw = log / "measured.json"
        raw.unlink(missing_ok=True)
        more = {"plain": self.launch.get("plain", False)} | more
        if not self.real:
            more = {"compute": self.wait(spec.size)} | more
        arguments = ["-m", *TIMED, *self.arguments(spec, log, steps)]
        self.start(spec.size, arguments, log, rate, TIMED_RUN=wanted(spec, raw, **more))
        if not raw.exists():
            raise RunError(f"nothing was measured (log in {log})")
        return raw

    def wait(self, size: int) -> float:
        return float(self.compute) * self.one.sizes[0] / size

    def measure(self, spec: RunSpec) -> dict[str, Any]:
        """Return a run's result. A missing prediction does not discard the measurement."""
        if "measure" in self.launch:
            return self.trained(spec)
        raw = self.timed(spec, timing(spec)["steps"], self.rate, spec.name)
        found = from_raw(spec, raw, self.per_node, "real" if self.real else "wait") | {"rate_mbit": self.rate}
        try:
            found["predicted"] = self.predicted(spec, found) if self.launch.get("predict", True) else None
        except (RunError, ValueError) as error:
            print(f"    not predicted: {error}", flush=True)
        return found

    def trained(self, spec: RunSpec) -> dict[str, Any]:
        """Return the losses, and the bytes if asked for, of a run that is not timed. Raises RunError."""
        log = self.queue.work / spec.name
        (log / "summary.json").unlink(missing_ok=True)
        self.start(spec.size, ["-m", "scripts.interfaces", *self.arguments(spec, log)], log, None)
        if (summary := read(log / "summary.json")) is None:
            raise RunError(f"the run wrote no summary (log in {log})")
        kept = ["steps", "validation_loss", "training_loss", "skipped_steps", "layout"]
        if self.launch["measure"] == "bytes":
            if summary["interfaces"] is None or summary["skipped_steps"]:
                raise RunError(f"the run counted no bytes on the interfaces, or skipped steps (log in {log})")
            kept += ["interfaces", PLANNED]
        return {"label": spec.label, **{key: summary.get(key) for key in kept}}

    def links(self, size: int) -> Links:
        """Return the links that the doctor measures with this size and rate."""
        path = self.queue.work / f"links-{self.one.name}-{size}.json"
        if found := self.store.noted("links", self.one.name, {"ranks": size}):
            write(path, found)
        else:
            log = path.with_suffix("")
            arguments = ["-m", "torchtitan_scape.doctor", f"--output={path}", f"--dump-folder={log}", "--machine=local"]
            arguments += [f"--ranks-per-node={self.per_node}", "--largest=16"]
            with suppress(RunError):  # a check failed
                self.start(size, arguments, log, self.rate)
            if (found := read(path)) is None:
                raise RunError(f"the doctor wrote no links (log in {log})")
            self.store.note("links", self.one.name, {"ranks": size}, found)
        return Links.from_json(path)

    def passes(self, spec: RunSpec) -> dict[str, Any]:
        """Return the cost of a method's step on this host without compute and exchange."""
        found = self.store.noted("passes", self.one.name, {"ranks": spec.size}) or {}
        if spec.method not in found:
            name = f"passes-{self.one.name}-{spec.method}-{spec.size}"
            measured = read(self.timed(spec, timing(spec)["steps"], None, name, compute=0, calibrate=True))
            measured.pop("summary")
            found = found | {spec.method: measured}
            self.store.note("passes", self.one.name, {"ranks": spec.size}, found)
        return dict(found[spec.method])

    def calibrated_rate(self) -> float:
        """Return the rate for a step of `slowdown` times its duration without limits and without the exchange."""
        if found := self.store.noted("rate", self.one.name, {}):
            return float(found["rate"])
        first = self.specs[0]

        def measured(rate: float | None) -> tuple[float, float, float]:
            print(f"[calibration] {first.label}, {f'{rate:.2f} Mbit/s' if rate else 'no limit'} ...", flush=True)
            raw = self.timed(first, timing(first)["warm_up"] + 6, rate, f"rate-{self.one.name}")
            found = from_raw(first, raw, self.per_node, "real")
            exposed = found["phases"]["exposed"]
            return found["step_seconds"] - exposed, exposed, found["nic"]["network"]

        alone, _, sent = measured(None)
        rate, goal = 8e-6 * sent / (alone * (self.slowdown - 1)), self.slowdown * alone
        tried: list[dict[str, float]] = []
        while True:
            own, exposed, _ = measured(rate)
            tried.append({"rate": rate, "without_exchange": own, "exchange": exposed})
            if len(tried) == 4 or abs((own + exposed) / goal - 1) < 0.03:
                break
            rate *= exposed / max(exposed + goal - (own + exposed), 0.1 * exposed)
        self.store.note("rate", self.one.name, {}, {"rate": rate, "not_limited": alone, "tried": tried})
        return rate

    def predicted(self, spec: RunSpec, measured: dict[str, Any]) -> dict[str, float] | None:
        """Return the step that the planner predicts from measured links and passes and the given or measured compute.

        None for peers, which overlap differently, and with a shard axis, which this prediction does not contain.
        """
        if "peer" in spec.about or spec.options["parallelism.data_parallel_shard_degree"] != 1:
            return None
        run, silent = planned_run(spec.options, spec.about.get("planned")), self.passes(spec)
        pack, optimizer = silent["by_phase"].get("pack", 0.0), silent["phases"]["optimizer"]
        levels = [LevelSize("node", self.per_node), LevelSize("network", spec.size // self.per_node)]
        levels = [level for level in levels if level.size > 1]
        model = workload_of(parse([f"--job.config_file={spec.recipe}"])).whole()
        payload = sum(call.input_bytes for call in run.options.collective_calls(model, levels) if not call.hidden)
        compute = measured["phases"]["compute"]
        found = predict_step(
            run,
            levels,
            self.links(spec.size),
            model,
            compute_seconds=compute if self.real else self.wait(spec.size),
            pack_seconds=pack,
            rest_seconds=optimizer - pack,
            fixed_seconds=max(0.0, silent["step_seconds"] - silent["phases"]["compute"] - optimizer),
            chunk_bytes=0 if run.is_dense else -(-payload // measured["payload_parts"]),
            backward_seconds=last_backward(compute, 1) if self.real else 0.0,
            flat=spec.options.get("topology.exchange") == "flat",
        )
        parts = {"compute": found.compute, "exposed": found.exchange, "optimizer": found.optimizer}
        return {"step_seconds": found.step, **parts}

    def notes(self) -> list[str]:
        """Return the text about the set-up for the report."""
        found = ["Forward and backward are real."]
        if not self.real:
            seconds = f"{float(self.compute):g} s with {self.one.sizes[0]} ranks"
            found = [f"Forward and backward are a wait of {seconds}, in proportion less with more; nothing is learned."]
        found += [
            f"All ranks share the host's {os.cpu_count()} cores: optimizer and exchange are slower with more ranks.",
            f"Interfaces send and receive at most {self.rate:.4g} Mbit/s." if self.rate else "Links have no limit.",
            f"{medians(self.launch)}; means over whole periods of methods that exchange once in several steps.",
        ]
        if self.launch.get("predict", True):
            found.append(
                "Predictions use links measured by the doctor, passes and other costs measured in steps of the same "
                "method without compute and exchange, and the given or measured compute. They test the model of the "
                "exchange, not of the passes. Coding is part of the measured exchange and not predicted."
            )
        if any("peer" in spec.about for spec in self.specs):
            found.append(PEERS_NOTE)
        found += ["No method has FSDP around its model, except TorchTitan's HSDP."] if self.launch.get("plain") else []
        if self.slowdown and (rate := self.store.noted("rate", self.one.name, {})):
            last, alone = rate["tried"][-1], rate["not_limited"]
            ratio = (last["without_exchange"] + last["exchange"]) / alone
            found.append(
                f"The rate was chosen so that a step of {self.specs[0].label} takes {self.slowdown:g} times its "
                f"{1e3 * alone:.0f} ms without limits and without the exchange; the last try had {ratio:.2f}."
            )
        return found


def run(queue: Queue) -> None:
    """Run what is missing, one run after the other."""
    queue.run_in_turn(lambda one: EmulatedSet(queue, one).measure)

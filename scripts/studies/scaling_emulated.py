"""The emulated launcher of strong_scaling.py: runs on network namespaces, with links measured and steps predicted."""

import json
import os
from pathlib import Path
from typing import Any

from scripts.common import RunError, read, write
from scripts.emulated_cluster import Cluster
from scripts.methods import OPTIMIZERS
from scripts.studies.scaling_sweep import NEVER, PEERS_NOTE, Cell, Plan, Sweep, from_raw, recipe_value
from topology.links import Links
from topology.ring_bytes import LevelSize
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.powersgd.options import largest_rank
from torchtitan_scape.methods.scape.payload import payload_bytes
from torchtitan_scape.planner.step import last_backward, predict_step

RANK = ["-m", "scripts.studies.scaling_rank"]


class Emulated:
    """Runs of one sweep; what is measured once a size lies in `folder`/calibration."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.args = sweep, sweep.args
        self.folder = sweep.folder / "calibration"
        self.logs = sweep.outputs
        self.real = self.args.compute == "real"
        self.rate: float | None = self.args.rate or None
        per_node = self.args.ranks_per_node
        if per_node < 1 or any(size % per_node for size in sweep.sizes):
            raise ValueError(f"--ranks-per-node {per_node} does not divide every one of --sizes {sweep.sizes}")
        if not self.real and not _is_positive(self.args.compute):
            raise ValueError(f"--compute is {self.args.compute!r}; give seconds, or real")
        during = [plan.name for plan in sweep.plans if plan.peer or (plan.planned is not None and plan.planned.overlap)]
        if during and not self.real:
            raise ValueError(f"{', '.join(during)}: exchanged during a real backward pass; these need --compute real")
        for cell in sweep.cells() if self.real else ():
            if (batch := self.batch(cell.recipe)) % cell.size:
                raise ValueError(f"a global batch of {batch} is no multiple of {cell.size} ranks; set --batch")
        if self.args.slowdown and not (self.args.slowdown > 1 and self.real and len(sweep.sizes) == 1):
            raise ValueError("--slowdown takes a factor above 1, --compute real and one size")

    # -------------------------------------------------------------------------------------------- runs

    def start(self, size: int, arguments: list[str], log: Path, rate: float | None, **env: str) -> None:
        """Runs torchrun's arguments on all nodes. Raises RunError."""
        per_node = self.args.ranks_per_node
        with Cluster(size // per_node, rate) as cluster:
            cluster.torchrun(arguments, per_node, log, self.args.timeout, env)

    def trainer(self, recipe: Path, size: int, log: Path) -> list[str]:
        """The command line of a run, but for its method and steps."""
        each = self.batch(recipe) // size if self.real else 1
        return [
            f"--job.config_file={recipe}",
            f"--job.dump_folder={log}",
            f"--training.local_batch_size={each}",
            f"--training.global_batch_size={each * size}",
            f"--metrics.log_freq={NEVER}",
            f"--validation.freq={NEVER}",
            "--sample.characters=0",
            *([] if self.real else ["--validation.local_batch_size=1", "--validation.steps=1"]),
            "--comm.train_timeout_seconds=900",
            "--debug.seed=0",
            *self.args.rest,
        ]

    def batch(self, recipe: Path) -> int:
        """Sequences a step, over all ranks: of the smallest size, each with the recipe's local batch."""
        return self.args.batch or recipe_value(recipe, "training", "local_batch_size") * self.sweep.sizes[0]

    def measure(self, cell: Cell, steps: int, rate: float | None, name: str) -> Path:
        """Trains; where the measurement is. Raises RunError."""
        log = self.logs / name
        raw = log / "measured.json"
        raw.unlink(missing_ok=True)
        wanted: dict[str, Any] = {"output": str(raw), "plain": self.args.plain, **self.timing(cell.plan)}
        if not self.real:
            wanted["compute"] = self.compute(cell.size)
        if cell.plan.again:
            wanted["again"] = True
        if cell.plan.peer:
            wanted |= {"peer": cell.plan.peer, "rank": self.rank_of(cell)}
        arguments = [*RANK, *self.trainer(cell.recipe, cell.size, log), f"--training.steps={steps}", *cell.plan.options]
        self.start(cell.size, arguments, log, rate, SCALING=json.dumps(wanted))
        if not raw.exists():
            raise RunError(f"nothing was measured (log in {log})")
        return raw

    def timing(self, plan: Plan) -> dict[str, int]:
        """Steps that are left out, and over how many of those that follow means are taken."""
        return {"warm_up": max(self.args.warm_up, plan.settles), "period": plan.period}

    def steps(self, plan: Plan) -> int:
        """Of a measurement: those that are left out, and whole periods."""
        periods = -(-self.args.steps // plan.period)
        return self.timing(plan)["warm_up"] + periods * plan.period

    def compute(self, size: int) -> float:
        return float(self.args.compute) * self.sweep.sizes[0] / size

    def cell(self, cell: Cell) -> dict[str, Any]:
        """Measures a cell. What is missing for its prediction or its loss does not undo the measurement."""
        args = self.args
        content = from_raw(self.measure(cell, self.steps(cell.plan), self.rate, cell.name), self.batch(cell.recipe))
        content |= {"nodes": cell.size // args.ranks_per_node, "ranks_per_node": args.ranks_per_node}
        content |= {"compute": "real" if self.real else "wait", "rate_mbit": self.rate}
        if not self.real or args.loss_steps:
            content["validation_loss"] = None  # of a few steps, or of gradients that are always the same
        content |= {"period": cell.plan.period}
        if cell.plan.planned is None:
            content["label"] = f"DDP, PowerSGD rank {self.rank_of(cell)}"
        print(f"    {1e3 * content['step_seconds']:.0f} ms a step", flush=True)
        try:
            content["predicted"] = self.predicted(cell, content)
        except (RunError, ValueError) as error:
            print(f"    not predicted: {error}", flush=True)
        if args.loss_steps:
            print(f"    now {args.loss_steps} steps for the loss ...", flush=True)
            try:
                longer = read(self.measure(cell, args.loss_steps, None, f"{cell.name}-loss"))["summary"]
                content |= {"validation_loss": longer["validation_loss"], "steps_trained": longer["steps"]}
            except RunError as error:
                print(f"    no loss: {error}", flush=True)
        return content

    # ------------------------------------------------------------------------------------ calibration

    def links(self, size: int) -> Links:
        """The preflight of this size, at this rate."""
        path = self.folder / f"links-{size}.json"
        if not path.exists():
            arguments = ["-m", "torchtitan_scape.planner.preflight", f"--output={path.resolve()}", "--machine=local"]
            arguments += [f"--ranks-per-node={self.args.ranks_per_node}", "--largest=16"]
            self.start(size, arguments, self.logs / path.stem, self.rate)
        return Links.from_json(path)

    def passes(self, recipe: Path, size: int) -> dict[str, Any]:
        """What a step of every method costs with this number of ranks on the host's cores, no compute, no exchange."""
        path = self.folder / f"passes-{recipe.stem}-{size}.json"
        wanted = {
            plan.name: {"options": [f"--training.steps={self.steps(plan)}", *plan.options], **self.timing(plan)}
            for plan in self.sweep.plans
            if not plan.peer
        }
        if set(wanted) - set(read(path) or {}):
            log = self.logs / path.stem
            scaling = {"output": str(path.resolve()), "calibrate": wanted, "compute": 0, "plain": self.args.plain}
            arguments = [*RANK, *self.trainer(recipe, size, log)]
            self.start(size, arguments, log, None, SCALING=json.dumps(scaling))
        return read(path)

    def shapes(self, recipe: Path) -> list[tuple[int, ...]]:
        """The model's tensors."""
        path = self.folder / f"shapes-{recipe.stem}.json"
        if not path.exists():
            from torchtitan_scape.config.parsing import parse
            from torchtitan_scape.trainer.layout import parameter_shapes

            write(path, parameter_shapes(parse([f"--job.config_file={recipe}", *self.args.rest])))
        return [tuple(shape) for shape in read(path)]

    def rank_of(self, cell: Cell) -> int:
        """PowerSGD's: as given, or that with no more bytes than SCAPE at 0.01 all-reduces."""
        shapes = self.shapes(cell.recipe)
        return cell.plan.rank or largest_rank(shapes, payload_bytes(shapes, 0.01))

    def calibrate_rate(self, dense: Plan) -> None:
        """Sets the rate so that the dense step takes `slowdown` times what it takes, exchange aside, without limits."""
        path, cell = self.folder / "rate.json", Cell(self.sweep.recipes[0], dense, self.sweep.sizes[0])
        if not path.exists():

            def measured(rate: float | None) -> tuple[float, float, float]:
                found = from_raw(self.measure(cell, self.args.warm_up + 6, rate, "rate"), self.batch(cell.recipe))
                exposed = found["phases"]["exposed"]
                return found["step_seconds"] - exposed, exposed, found["nic"]["network"]

            print(f"[calibration] {dense.label}, links not limited ...", flush=True)
            alone, _, sent = measured(None)
            rate = 8e-6 * sent / (alone * (self.args.slowdown - 1))
            tried, goal = [], self.args.slowdown * alone
            for last in (False, False, False, True):
                print(f"[calibration] {dense.label} at {rate:.2f} Mbit/s ...", flush=True)
                own, exposed, _ = measured(rate)
                tried.append({"rate": rate, "without_exchange": own, "exchange": exposed})
                if last or abs((own + exposed) / goal - 1) < 0.03:
                    break
                rate *= exposed / max(exposed + goal - (own + exposed), 0.1 * exposed)
            write(path, {"rate": rate, "not_limited": alone, "tried": tried})
        self.rate = read(path)["rate"]

    # ------------------------------------------------------------------------------------- prediction

    def predicted(self, cell: Cell, measured: dict[str, Any]) -> dict[str, float] | None:
        """The step by the cost model, from measured links, passes and the given (or this run's own) compute."""
        plan, per_node = cell.plan, self.args.ranks_per_node
        if plan.peer or plan.measured is None or any(option.startswith("--parallelism") for option in self.args.rest):
            return None  # DDP overlaps in its own way; the model below is of replicas without shards
        silent, shapes = self.passes(cell.recipe, cell.size)[plan.name], self.shapes(cell.recipe)
        passes, optimizer = silent["by_phase"], silent["phases"]["optimizer"]
        tiers = [("node", per_node), ("network", cell.size // per_node)]
        model, levels = LocalModel.of_shapes(shapes), [LevelSize(*tier) for tier in tiers if tier[1] > 1]
        payload = sum(call.input_bytes for call in plan.measured.collective_calls(model, levels) if not call.hidden)
        found = predict_step(
            plan.measured,
            levels,
            self.links(cell.size),
            model,
            compute_seconds=measured["phases"]["compute"] if self.real else self.compute(cell.size),
            pack_seconds=passes.get("pack", 0.0),
            rest_seconds=optimizer - passes.get("pack", 0.0),
            fixed_seconds=max(0.0, silent["step_seconds"] - silent["phases"]["compute"] - optimizer),
            chunk_bytes=0 if plan.name in OPTIMIZERS else -(-payload // measured["payload_parts"]),
            backward_seconds=last_backward(measured["phases"]["compute"], 1) if self.real else 0.0,
            flat="--topology.exchange flat" in " ".join(self.args.rest).replace("=", " "),
        )
        parts = {"compute": found.compute, "exposed": found.exchange, "optimizer": found.optimizer}
        return {"step_seconds": found.step, **parts}


def run(sweep: Sweep) -> int:
    """Runs what is missing and writes the report. Returns the number of failed cells."""
    emulated = Emulated(sweep)
    machine = f"{os.cpu_count()} cores, gloo over TCP between network namespaces"
    sweep.store(machine)  # so that another set-up cannot be mixed in
    if sweep.args.slowdown:
        emulated.calibrate_rate(Plan.parse("adams"))
    sweep.notes = notes(emulated)
    return sweep.run(emulated.cell, machine)


def notes(emulated: Emulated) -> list[str]:
    """What the report says about the set-up."""
    args, rate = emulated.args, emulated.rate
    told = [
        f"All ranks share the host's {os.cpu_count()} cores; optimizer and exchange are real, and slower the more "
        "ranks there are.",
        f"NICs limited to {rate:.4g} Mbit/s each way." if rate else "NICs not limited.",
        f"Medians over {args.steps} steps after {args.warm_up}, of what exchanges once in several steps means over a "
        "whole period; a step is that of its slowest rank.",
        "Predicted: links from the preflight; passes and what the trainer costs besides from steps of the same method "
        "without compute and exchange; compute as given or, where real, this run's own. So what is put to the test is "
        "the exchange and how the parts add up, not the passes. Coding is measured in the exchange, and not predicted.",
    ]
    if not emulated.real:
        seconds, first = emulated.compute(emulated.sweep.sizes[0]), emulated.sweep.sizes[0]
        wait = f"Forward and backward are a wait of {seconds:g} s on {first} ranks and in proportion less on more"
        return [f"{wait}; nothing is learnt.", *told]
    told = ["Forward and backward are real.", *told]
    told.append(PEERS_NOTE)
    told.append(
        "No method has FSDP around its model."
        if args.plain
        else "A model of one shard in FP32, as the embedded recipe has, has FSDP2 around it with HSDP alone."
    )
    if args.slowdown and (found := read(emulated.folder / "rate.json")):
        last = found["tried"][-1]
        told.append(
            f"The rate was chosen for a dense AdamS step of {args.slowdown:g} x its compute-only step, "
            f"{1e3 * found['not_limited']:.0f} ms that it takes on links without limits, exchange left out; the last "
            f"try gave {(last['without_exchange'] + last['exchange']) / found['not_limited']:.2f} x."
        )
    return told


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False

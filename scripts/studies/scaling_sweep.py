"""What a strong-scaling sweep measures (its methods and cells), and where that is kept. strong_scaling.py starts it."""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scripts import methods
from scripts.common import OUTPUTS, RunError, command_of, read, write
from scripts.studies.scaling_report import write_report
from torchtitan_scape.config.recipes import load
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.powersgd.options import PowersgdOptions
from torchtitan_scape.planner.bf16 import Bf16Options
from torchtitan_scape.planner.run import PlannedRun

NEVER = 1_000_000  # steps between two logs or validations
# By name: what they are called, and as what the cost model knows them.
PEERS = {
    "ddp": ("DDP, FP32 gradients", DenseOptions()),
    "ddp-bf16": ("DDP, BF16 gradients", Bf16Options()),
    "hsdp": ("TorchTitan's HSDP", DenseOptions()),
    "hsdp-waits": ("TorchTitan's HSDP, gloo waiting", DenseOptions()),
}
PEERS_NOTE = (
    "DDP and HSDP exchange while the backward pass runs: as exposed communication counts by how much their forward and "
    "backward take longer than the same passes without an exchange. Peers count no bytes; the interfaces do."
)
KNOWN = f"{methods.KNOWN}; of others {', '.join(PEERS)}, ddp-powersgd, ddp-powersgd-4 (any rank)"


@dataclass(frozen=True)
class Plan:
    """A method as this sweep runs it: options of the trainer, and what scaling_rank.py is told.

    planned: as the cost model knows it; None where its rank is chosen by the bytes of the model. peer: of
    scaling_peers.py. measured, settles, period: as of `methods.Named`. again: weights that
    cross nodes once an update do so in every forward pass, as ZeRO++ has been published.
    """

    name: str
    label: str
    options: tuple[str, ...]
    planned: PlannedRun | None
    measured: PlannedRun | None = None
    peer: str = ""
    rank: int = 0
    settles: int = 0
    period: int = 1
    again: bool = False

    @classmethod
    def parse(cls, name: str) -> "Plan":
        """Raises ValueError with what is known."""
        options = ("--sync.method=dense", "--optimizer.name=AdamS")
        if name in PEERS:
            label, section = PEERS[name]
            return cls(name, label, options, PlannedRun(section, overlap=name != "hsdp-waits"), peer=name)
        if match := re.fullmatch(r"ddp-powersgd(?:-([1-9]\d*))?", name):
            rank = int(match[1] or 0)
            label = f"DDP, PowerSGD rank {rank}" if rank else "DDP, PowerSGD of equal bytes"
            planned = PlannedRun(PowersgdOptions(rank=rank)) if rank else None
            return cls(name, label, options, planned, peer="ddp-powersgd", rank=rank)
        try:
            found = methods.parse(name)
        except ValueError:
            raise ValueError(f"there is no method {name!r}; known are {KNOWN}") from None
        return cls(
            name,
            found.label,
            (*found.options, *found.at_once),
            found.planned,
            found.measured,
            settles=found.settles,
            period=found.period,
        )


class Cell(NamedTuple):
    recipe: Path
    plan: Plan
    size: int

    @property
    def name(self) -> str:
        return f"{self.recipe.stem}-{self.plan.name}-{self.size}"

    def head(self, launcher: str) -> dict[str, Any]:
        named = {"recipe": self.recipe.stem, "method": self.plan.name, "label": self.plan.label, "size": self.size}
        return {"launcher": launcher, **named}


class Sweep:
    """The cells of a sweep and where they are kept. module: which started it. others: arguments that may change, as
    they say which cells and where, not how they are measured."""

    module = "scripts.studies.strong_scaling"
    others: tuple[str, ...] = ("output", "methods", "sizes", "recipes")

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, args.output
        self.outputs = OUTPUTS / self.module.rpartition(".")[2] / args.output.name
        self.plans = [self.plan(name) for name in args.methods]
        self.recipes = [Path(recipe) for recipe in args.recipes]
        for recipe in self.recipes:
            if not recipe.is_file():
                raise ValueError(f"the recipe {recipe} does not exist; recipes are in train_configs/")
        if len(set(args.sizes)) != len(args.sizes) or min(args.sizes) < 1:
            raise ValueError(f"--sizes {args.sizes}: give different numbers of ranks, 1 or more")
        self.sizes = sorted(args.sizes)
        # Cells of another set-up must not stand beside these.
        self.setup = {k: str(v) for k, v in vars(args).items() if k not in self.others}
        stored = self.folder / "sweep.json"
        if stored.exists() and (before := (read(stored) or {}).get("setup") or {}) != self.setup:
            changed = [k for k in self.setup if before.get(k) != self.setup[k]]
            raise ValueError(
                f"{self.folder} holds a sweep with another --{(changed or ['launcher'])[0].replace('_', '-')}; "
                "give another --output, or remove it"
            )
        self.notes: list[str] = []

    def plan(self, name: str) -> Plan:
        """Raises ValueError for an unknown one."""
        return Plan.parse(name)

    def report(self) -> Path:
        """Writes it, and says where."""
        return write_report(self.folder)

    def cells(self) -> list[Cell]:
        return [Cell(r, plan, size) for r in self.recipes for size in self.sizes for plan in self.plans]

    def path(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.json"

    def done(self, cell: Cell) -> bool:
        stored = read(self.path(cell))
        return stored is not None and "error" not in stored

    def keep(self, cell: Cell, content: dict[str, Any]) -> None:
        write(self.path(cell), {**cell.head(self.args.launcher), **content})

    def fail(self, cell: Cell, why: str) -> None:
        print(f"    failed: {why}", flush=True)
        self.keep(cell, {"error": why})

    def run(self, measure: Callable[[Cell], dict[str, Any]], machine: str) -> int:
        """Measures the missing cells one after the other, with the time that is left by the mean so far; reports.

        Returns how many failed. What `measure` raises as RunError or ValueError is the cell's error.
        """
        self.store(machine)
        cells, taken = self.cells(), list[float]()
        to_do = [cell for cell in cells if not self.done(cell)]
        for i, cell in enumerate(to_do):
            left = f"; about {sum(taken) / len(taken) * (len(to_do) - i) / 60:.0f} min left" if taken else ""
            number = len(cells) - len(to_do) + i + 1
            where = f"{cell.plan.label} on {cell.size} ranks, {cell.recipe.stem}"
            print(f"[{number}/{len(cells)}] {where} ...{left}", flush=True)
            begin = time.monotonic()
            try:
                self.keep(cell, measure(cell))
            except (RunError, ValueError) as error:  # of a cluster that could not be made, too
                self.fail(cell, str(error))
            taken.append(time.monotonic() - begin)
        return self.finish(machine)

    def store(self, machine: str) -> None:
        """Notes what is swept and how, before cells of another set-up can be mixed in."""
        content = {
            "launcher": self.args.launcher,
            "command": command_of(self.module),
            "machine": machine,
            "notes": self.notes,
            "sizes": self.sizes,
            "methods": [plan.name for plan in self.plans],
            "recipes": [recipe.stem for recipe in self.recipes],
            "setup": self.setup,
        }
        write(self.folder / "sweep.json", content)

    def finish(self, machine: str) -> int:
        """Stores what was swept and writes the report. Returns how many cells failed."""
        self.store(machine)
        report = self.report()
        failed = [cell for cell in self.cells() if not self.done(cell)]
        print(f"{len(self.cells()) - len(failed)} measured, {len(failed)} failed; see {report}")
        return len(failed)


def from_raw(raw: Path, batch: int) -> dict[str, Any]:
    """What scaling_rank.py measured, as a cell. `batch`: sequences a step, over all ranks."""
    measured = json.loads(raw.read_text())
    summary = measured.pop("summary")
    sent = (summary.get("interfaces") or {}).get("sent_per_step", {})
    nic, counted = (
        {level: statistics.fmean(node[kind] for node in nodes) for level, nodes in sent.items()}
        for kind in ("interface", "counted")
    )
    return {
        **measured,
        "nic": nic or None,
        "counted": counted if counted and measured["sent"] else None,
        "tokens_per_step": batch * summary["sequence"],
        "validation_loss": summary["validation_loss"],
        "steps_trained": summary["steps"],
        "payload_parts": summary["payload_parts"],
        "predicted": None,
    }


def recipe_value(recipe: Path, section: str, key: str) -> int:
    """A number that a recipe sets. Raises ValueError where it does not."""
    value = load(str(recipe)).table.get(section, {}).get(key)
    if not isinstance(value, int):
        raise ValueError(f"{recipe} has no number at [{section}] {key}; set it, or give --batch")
    return value

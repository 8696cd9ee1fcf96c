"""Predicted step time of the run whose replicas are simulated."""

from dataclasses import dataclass
from typing import Any

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.core.text import seconds_text
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.models.registry import workload_of
from torchtitan_scape.planner.configured import method_of, shard_axis_of
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.planner.step import FSDP, Assumptions, Prediction, predict
from torchtitan_scape.topology.layout import Layout, simulated_layout
from torchtitan_scape.topology.machines import Links


@dataclass(frozen=True)
class Forecast:
    """Predicted step of the real run on the configured machine, and of dense AdamS, from its links."""

    layout: Layout
    run: Prediction
    dense: Prediction

    @classmethod
    def of(cls, config: JobConfig, layout: Layout) -> "Forecast":
        """Return the forecast. `layout` is that of the process, or group of shards, that simulates the replicas."""
        simulated = simulated_layout(layout, config.topology.simulate_replicas)
        workload, links = workload_of(config), Links.from_machine(layout.machine)
        shard_axis, _ = shard_axis_of(config, layout)
        run, dense = (
            predict(
                method,
                workload,
                simulated,
                links,
                batch=workload.batch,
                micro_batch=config.training.local_batch_size,
                shard_axis=plan,
            )
            for method, plan in ((method_of(config), shard_axis), (PlannedRun(DenseOptions(), "AdamS"), FSDP))
        )
        return cls(simulated, run, dense)

    @property
    def links(self) -> str:
        return "measured" if self.layout.machine.measured else "nominal"

    @property
    def speedup(self) -> float:
        return self.dense.step / self.run.step

    def line(self) -> str:
        """Return the part of a log line."""
        run, dense = seconds_text(self.run.step), seconds_text(self.dense.step)
        return (
            f"predicted on {self.layout.machine.name} ({self.links}): {self.run.method.name} {run} per step, "
            f"dense AdamS {dense}, {self.speedup:.2f} x"
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows (name, value) for the summary."""
        layout = self.layout
        return [
            (
                "predicted",
                f"on {layout.machine.name}, {layout.replicate} replicas on {layout.nodes} node(s) of "
                f"{layout.ranks_per_node} rank(s), from {self.links} links: {self.speedup:.2f}x as fast as dense AdamS",
            ),
            ("  this run", _parts(self.run)),
            ("  dense AdamS", _parts(self.dense)),
        ]

    def figures(self) -> dict[str, Any]:
        """Return the entries of summary.json: seconds and bytes per step, of one rank."""
        layout, assumed = self.layout, Assumptions()
        return {
            "machine": layout.machine.name,
            "layout": layout.describe(),
            "assumes": f"{self.links} links, {assumed.mfu:g} of the peak of {layout.machine.device.name}, "
            f"{assumed.memory_efficiency:g} of its memory bandwidth; no step was timed there",
            "speedup_over_dense": self.speedup,
            "run": _figures(self.run),
            "dense": _figures(self.dense),
        }


def _parts(p: Prediction) -> str:
    parts = {"compute": p.compute, "exchange": p.exchange, "optimizer": p.optimizer}
    parts |= {"shard axis": p.shard} if p.shard else {}
    listed = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items())
    return f"{seconds_text(p.step)} per step: {listed}"


def _figures(p: Prediction) -> dict[str, Any]:
    return {
        "method": p.method.name,
        "seconds_per_step": p.step,
        "compute": p.compute,
        "exchange": p.exchange,
        "shard_axis": p.shard,
        "optimizer": p.optimizer,
        "hidden_exchange": p.hidden,
        "bytes_sent_per_step_and_rank": p.sent,
    }

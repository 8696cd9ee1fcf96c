"""A run of the trainer that compares the counted bytes with the nodes' network interfaces, in training steps only.

    python -m scripts.interfaces --job.config_file=...     # arguments of torchtitan_scape.train

The comparison is in summary.json as "interfaces". It needs SCAPE_COUNT_INTERFACES=1, the same on all ranks, because it
adds barriers. `scripts/emulated_cluster.py` sets it, and TRAIN_PROGRAM, with which ./run_train.sh starts this module.

The counters of an interface include headers, acknowledgements, retransmissions and the traffic of other programs. They
include gloo's TCP traffic but not NCCL's own transports.
"""

import json
import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scripts.common import write
from torchtitan_scape.core.patching import replaced
from torchtitan_scape.core.text import size_text
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.trainer import command
from torchtitan_scape.trainer.trainer import ScapeTrainer

logger = logging.getLogger(__name__)


COUNTERS = Path("/proc/net/dev")


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank over some steps.

    Attributes:
        node: Index of the rank's node.
        counted: Bytes that the rank's ledger counted as sent, by (link level, kind of message).
        interfaces: Bytes that the interfaces of the node sent in the same steps, by level as in `by_level`.
    """

    node: int
    counted: Mapping[tuple[str, str], float]
    interfaces: Mapping[str, int]


def parse_counters(text: str) -> dict[str, tuple[int, int]]:
    """Parse the text of /proc/net/dev into (bytes sent, bytes received) by interface.

    Raises ValueError, which quotes the line, for an unknown format.
    """
    counters = {}
    for line in text.splitlines()[2:]:  # after two header lines
        # Old kernels print no space after the colon, and interface names may contain a colon.
        name, _, figures = line.rpartition(":")
        fields = figures.split()
        if not name.strip() or len(fields) < 16 or not (fields[0].isdigit() and fields[8].isdigit()):
            raise ValueError(f"{COUNTERS} has the line {line!r}; expected an interface's name and 16 counters")
        counters[name.strip()] = (int(fields[8]), int(fields[0]))
    return counters


def by_level(counters: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return (bytes sent, bytes received) of the loopback ("node") and of all other interfaces together ("network")."""
    others = [figures for name, figures in counters.items() if name != "lo"]
    return {
        "node": counters.get("lo", (0, 0)),
        "network": (sum(sent for sent, _ in others), sum(received for _, received in others)),
    }


def read_interfaces() -> dict[str, tuple[int, int]] | None:
    """Return `by_level` of this process's network namespace since its creation; None without /proc/net/dev."""
    try:
        text = COUNTERS.read_text()
    except OSError:
        return None
    return by_level(parse_counters(text))


def compare(ranks: Sequence[RankBytes], steps: int) -> dict[str, list[dict[str, Any]]]:
    """Compare the counted bytes of each node's ranks with the node's interface counters.

    The ranks of a node report the same interfaces, so the counters of its first rank are used. Traffic within a GCD
    pair also uses the loopback.

    Returns:
        By level one entry per node, in bytes sent per step. `by_kind` is `counted` by kind of message; `ratio` is
        `interface` / `counted`, None if nothing was counted.
    """
    nodes: dict[int, list[RankBytes]] = defaultdict(list)
    for rank in ranks:
        nodes[rank.node].append(rank)
    table: dict[str, list[dict[str, Any]]] = {}
    for level, counted_as in (("node", ("gcd_pair", "node")), ("network", ("network",))):
        table[level] = []
        for node, members in sorted(nodes.items()):
            by_kind: dict[str, float] = defaultdict(float)
            for member in members:
                for (name, kind), sent in member.counted.items():
                    if name in counted_as:
                        by_kind[kind] += sent
            counted = sum(by_kind.values())
            interface = members[0].interfaces[level]
            table[level].append(
                {
                    "node": node,
                    "counted": counted / steps,
                    "by_kind": {kind: sent / steps for kind, sent in sorted(by_kind.items())},
                    "interface": interface / steps,
                    "ratio": interface / counted if counted else None,
                }
            )
    return table


class InterfaceCount:
    """Bytes sent by the node's interfaces during training steps, and bytes that its ranks counted for the same steps.

    Enabled by SCAPE_COUNT_INTERFACES=1, with gloo, on systems with /proc/net/dev. The comparison is valid only if
    nothing else uses the interfaces: scripts/emulated_cluster.py ensures this and sets the variable.

    The first step is excluded, because it includes process groups, connections and the initial broadcast. From then on
    one window stays open over consecutive steps. It is closed before a validation, a checkpoint and the end, and
    reopened with the next step. At both ends pending mask exchanges are completed and all ranks synchronize, so that
    every counted byte has been sent and no byte of another step. Within a window there is no additional
    synchronization, so exchange and compute still overlap.

    The interfaces also carry bytes that no rank counts: headers and acknowledgements (1 %), gloo's own messages (2 to 5
    kB per collective on four nodes, whatever its size), TorchTitan's scalars (a token count per step, 0.6 kB; losses
    and metrics in logged steps, 7 kB), and torchrun's heartbeat. If a step sends a few hundred kB or more, all of them
    together are below 5 %.
    """

    def __init__(self, layout: Layout, optimizers: ReplicaOptimizer) -> None:
        self._layout, self._optimizers = layout, optimizers
        self.first = 1  # Number of excluded steps at the start.
        self._steps = 0
        self._open: tuple[dict[tuple[str, str], float], dict[str, int]] | None = None
        self._counted: dict[tuple[str, str], float] = defaultdict(float)
        self._moved: dict[str, int] = defaultdict(int)
        self.enabled = os.environ.get("SCAPE_COUNT_INTERFACES") == "1" and not optimizers.collectives.is_fake
        if self.enabled and (optimizers.grad_norm.device.type != "cpu" or read_interfaces() is None):
            logger.warning("SCAPE_COUNT_INTERFACES=1 has no effect: it needs gloo on a system with /proc/net/dev")
            self.enabled = False

    def before_step(self, steps_taken: int) -> None:
        """Open the window if it is closed. All ranks call it before every step, with the steps that this process has
        taken.
        """
        if self.enabled and steps_taken >= self.first and self._open is None:
            self._open = self._read_counters()

    def after_step(self, step_follows: bool) -> None:
        """Close the window unless a step follows directly."""
        if self._open is not None:
            self._steps += 1
            if not step_follows:
                self._close()

    def summary(self) -> dict[str, Any] | None:
        """Return bytes sent per step by level and node, as `compare` returns them; None if nothing was measured.
        Collective.
        """
        self._close()  # The window is still open if the data ended within a step.
        if self._steps == 0:
            return None
        local_bytes = RankBytes(self._layout.node(dist.get_rank()), dict(self._counted), dict(self._moved))
        ranks = self._optimizers.collectives.gather_objects(local_bytes)
        others = {axis: getattr(self._layout, axis) for axis in ("context", "tensor", "pipeline")}
        return {
            "steps": self._steps,
            "sent_per_step": compare(ranks, self._steps),
            "not_counted": "headers and acknowledgements, gloo's own messages, the trainer's scalars, the launcher"
            + "".join(f", collectives on the {axis} axis" for axis, degree in others.items() if degree > 1),
        }

    def _close(self) -> None:
        if self._open is None:
            return
        counted, moved = self._read_counters()
        for kind, sent in counted.items():
            self._counted[kind] += sent - self._open[0].get(kind, 0.0)
        for level, bytes_sent in moved.items():
            self._moved[level] += bytes_sent - self._open[1][level]
        self._open = None

    def _read_counters(self) -> tuple[dict[tuple[str, str], float], dict[str, int]]:
        """Return the bytes so far, with all ranks idle: counted by this rank, by level and kind; sent by its
        interfaces.
        """
        self._optimizers.finish_previous_step()
        dist.barrier()
        moved = read_interfaces()
        assert moved is not None
        dist.barrier()  # Otherwise another rank of this node could send before the counters are read.
        counted = self._optimizers.collectives.ledger.sent_by_level_and_kind()
        return counted, {level: sent for level, (sent, _) in moved.items()}


def interface_lines(figures: dict[str, Any] | None) -> list[str]:
    """Return `InterfaceCount.summary` as log lines: totals over nodes, and the range of their ratios."""
    lines = []
    for level, nodes in figures["sent_per_step"].items() if figures else ():
        ratios = [node["ratio"] for node in nodes if node["ratio"] is not None]
        counted, moved = (sum(node[key] for node in nodes) for key in ("counted", "interface"))
        if counted or moved:
            text = f"{min(ratios):.3f} to {max(ratios):.3f} x" if ratios else "nothing was counted"
            lines.append(f"{level}: {size_text(counted)} counted, {size_text(moved)} on the interfaces ({text})")
    return lines


class CountingTrainer(ScapeTrainer):
    """The trainer with an `InterfaceCount`, which adds "interfaces" to summary.json; null if nothing was measured."""

    def __init__(self, job_config: Any) -> None:
        super().__init__(job_config)
        self.interfaces = InterfaceCount(self.layout, self.replica_optimizer)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        self.interfaces.before_step(self.steps_taken)
        super().train_step(data_iterator)
        self.interfaces.after_step(self._a_step_follows())

    def _a_step_follows(self) -> bool:
        """Return whether the next step follows directly: no validation, no checkpoint, and not the end."""
        last = self.step == self.job_config.training.steps
        validates = self.job_config.validation.enable and self.validator.should_validate(self.step)
        return not (last or validates or self.checkpointer.saves_at(self.step, last))

    def summarize(self) -> None:
        figures = self.interfaces.summary()  # before the messages of the summary
        super().summarize()
        if dist.get_rank() == 0:
            path = Path(self.job_config.job.dump_folder, "summary.json")
            write(path, json.loads(path.read_text()) | {"interfaces": figures})
            for line in interface_lines(figures):
                logger.info(f"interfaces, per step: {line}")


def main() -> None:
    with replaced(command, "ScapeTrainer", CountingTrainer):
        command.main()


if __name__ == "__main__":
    main()

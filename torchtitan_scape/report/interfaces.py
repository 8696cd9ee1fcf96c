"""Counted bytes beside those of the nodes' network interfaces, over the training steps alone."""

import os
from collections import defaultdict
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from topology.interfaces import RankBytes, compare, read_interfaces
from topology.layout import Layout
from torchtitan_scape.core.text import size_text
from torchtitan_scape.replica.optimizer import ReplicaOptimizersBase


class InterfaceCount:
    """What the node's interfaces sent over the training steps, beside what its ranks counted for the same steps.

    On with SCAPE_COUNT_INTERFACES=1, with gloo, where the system has /proc/net/dev. It holds only where nothing else
    uses the interfaces: scripts/emulated_cluster.py sees to that and sets the variable.

    The first step stays outside: process groups, connections and the broadcast of the start come before. From then
    on one window stays open over as many steps as follow each other directly. It is closed before a validation, a
    checkpoint and the end, and opens again with the next step. At both ends the masks in flight are settled and all
    ranks wait for each other, so that every byte that is counted has left, and none of another step has. Inside,
    nothing is waited for: the overlap of exchange and compute stays as it is.

    What no rank counts but the wires carry: headers and acknowledgements (1 %), gloo's own messages (2 to 5 kB a
    collective on four nodes, whatever its size), TorchTitan's scalars (a token count at every step, 0.6 kB; losses
    and our figures where it logs, 7 kB), and torchrun's heartbeat. Where a step sends a few hundred kB or more all this
    is below 5 %; below that it is not.
    """

    def __init__(self, layout: Layout, optimizers: ReplicaOptimizersBase) -> None:
        self._layout, self._optimizers = layout, optimizers
        self.first = 1  # steps before it stay outside
        self._steps = 0
        self._open: tuple[dict[tuple[str, str], float], dict[str, int]] | None = None
        self._counted: dict[tuple[str, str], float] = defaultdict(float)
        self._moved: dict[str, int] = defaultdict(int)
        self.enabled = os.environ.get("SCAPE_COUNT_INTERFACES") == "1" and not optimizers.collectives.is_fake
        if self.enabled and (optimizers.grad_norm.device.type != "cpu" or read_interfaces() is None):
            logger.warning("SCAPE_COUNT_INTERFACES=1 has no effect: it needs gloo on a system with /proc/net/dev")
            self.enabled = False

    def before_step(self, steps_taken: int) -> None:
        """To be called in front of every step, by all ranks. steps_taken: by this process so far."""
        if self.enabled and steps_taken >= self.first and self._open is None:
            self._open = self._look()

    def after_step(self, step_follows: bool) -> None:
        """step_follows: the next thing that this process sends belongs to a step."""
        if self._open is not None:
            self._steps += 1
            if not step_follows:
                self._close()

    def summary(self) -> dict[str, Any] | None:
        """Bytes sent per step by level and node, as `compare` has them; None where nothing was measured.

        A collective call.
        """
        self._close()  # where the data ran out in the middle of a step
        if self._steps == 0:
            return None
        own = RankBytes(self._layout.node(dist.get_rank()), dict(self._counted), dict(self._moved))
        ranks = self._optimizers.collectives.gather_objects(own)
        others = {"context": self._layout.context, "tensor": self._layout.tensor}
        return {
            "steps": self._steps,
            "sent_per_step": compare(ranks, self._steps),
            "not_counted": "headers and acknowledgements, gloo's own messages, the trainer's scalars, the launcher"
            + "".join(f", collectives on the {axis} axis" for axis, degree in others.items() if degree > 1),
        }

    def _close(self) -> None:
        if self._open is None:
            return
        counted, moved = self._look()
        for kind, sent in counted.items():
            self._counted[kind] += sent - self._open[0].get(kind, 0.0)
        for level, bytes_sent in moved.items():
            self._moved[level] += bytes_sent - self._open[1][level]
        self._open = None

    def _look(self) -> tuple[dict[tuple[str, str], float], dict[str, int]]:
        """Bytes so far, while all ranks are silent: counted by this rank, by level and kind; sent by its interfaces."""
        self._optimizers.finish_previous_step()
        dist.barrier()
        moved = read_interfaces()
        assert moved is not None
        dist.barrier()  # a twin on this node that ran ahead would send before the counters are read
        counted = self._optimizers.collectives.ledger.sent_by_level_and_kind()
        return counted, {level: sent for level, (sent, _) in moved.items()}


def interface_lines(figures: dict[str, Any] | None) -> list[str]:
    """`InterfaceCount.summary` for the log: all nodes together, and the range of their ratios."""
    lines = []
    for level, nodes in figures["sent_per_step"].items() if figures else ():
        ratios = [node["ratio"] for node in nodes if node["ratio"] is not None]
        counted, moved = (sum(node[key] for node in nodes) for key in ("counted", "interface"))
        if counted or moved:
            text = f"{min(ratios):.3f} to {max(ratios):.3f} x" if ratios else "nothing was counted"
            lines.append(f"{level}: {size_text(counted)} counted, {size_text(moved)} on the interfaces ({text})")
    return lines

"""Predicted size of a checkpoint, and the time to write it. Plain arithmetic: no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_scape.core.text import kinds_text, seconds_text, size_text
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.topology.machines import ASSUMED_STORAGE, Links, Machine

_PENDING = ("residual", "owner_error")  # kinds of `PlannedRun.device_memory` that every replica has


@dataclass(frozen=True)
class Saving:
    """`[checkpoint]` of a run; the defaults are TorchTitan's.

    Attributes:
        residual: `residual`.
        keep: `keep_latest_k`; 0 for all.
        count: Checkpoints that the run writes; 0 if that is not known.
        copies: `copies`.
    """

    residual: str = "exact"
    keep: int = 10
    count: int = 0
    copies: int = 0


DEFAULT_SAVING = Saving()


def checkpoint_bytes(run: PlannedRun, model: LocalModel, replicas: int, residual: str = "exact") -> dict[str, float]:
    """Return the bytes of a checkpoint of all ranks by kind.

    Args:
        model: Whole parameters.
        residual: `[checkpoint] residual`.
    """
    options, rows = run.options, replicas if residual == "exact" else 1
    kinds = run.device_memory(model, replicas) | options.host_memory(model, replicas)
    sizes = {"parameters": 4.0 * model.entries}
    if options.holds_optimizer_state:
        # A replica's tensor has the moment on the mask and the residual elsewhere, unless owners have the moment; the
        # mean of the residuals is saved within the moment. Masks are saved as bytes.
        owned = replicas * kinds.get("owned moments", 0.0)
        sizes["residual" if owned else "moment and residual"] = kinds["state"] * (0 if owned and rows == 1 else rows)
        sizes |= {"masks": float(model.entries), "moments": owned}
        sizes["masters"] = replicas * kinds.get("owned master", 0.0)
        if kinds["parameters"] < sizes["parameters"]:
            sizes["BF16 weights"] = kinds["parameters"]
        return {kind: nbytes for kind, nbytes in sizes.items() if nbytes}
    sizes["moments"] = kinds.get("state", 0.0) * (rows if options.per_replica_weights else 1)
    if options.per_replica_weights:
        sizes["weights of replicas"] = rows * sizes["parameters"]
        # Of NoLoCo; the mean of the slow weights is saved as the model.
        sizes["slow weights"] = replicas * kinds.get("slow_weights", 0.0) if residual == "exact" else 0.0
        sizes["slow momentum"] = rows * kinds.get("slow_momentum", 0.0)
    if options.divides_update:  # every replica has its part
        sizes |= {"moments": replicas * sizes["moments"], "unsent_update": replicas * kinds.get("unsent_update", 0.0)}
    if residual != "drop":
        # Residuals of a divided update are in BF16, and their mean in FP32.
        width = 2 if options.divides_update and residual == "mean" else 1
        sizes |= {kind: width * rows * kinds.get(kind, 0.0) for kind in _PENDING}
    sizes |= {kind: kinds.get(kind, 0.0) for kind in ("outer momentum", "bases")}
    return {kind: nbytes for kind, nbytes in sizes.items() if nbytes}


@dataclass(frozen=True)
class CheckpointCost:
    """A checkpoint of all ranks, and the machine that writes it.

    Attributes:
        kinds: Bytes by kind.
        ranks: Number of ranks that write.
        saving: Which of them are kept.
    """

    kinds: Mapping[str, float]
    ranks: int
    machine: Machine
    links: Links
    saving: Saving = DEFAULT_SAVING

    @property
    def total(self) -> float:
        return sum(self.kinds.values())

    @property
    def storage(self) -> float:
        """Bytes/s of the file system: the machine's, or the assumed ones."""
        return 1e9 * (self.machine.storage or ASSUMED_STORAGE)

    @property
    def seconds(self) -> float:
        """Time to write it, at the slower of the ranks' links to the network and the file system."""
        return self.total / min(self.ranks * self.links["network"].bandwidth, self.storage)

    def describe(self) -> str:
        """Return the size, what is kept, and the time, in words."""
        large = {kind: nbytes for kind, nbytes in self.kinds.items() if 1000 * nbytes > self.total}
        kept = min((count for count in (self.saving.keep, self.saving.count) if count), default=0)
        stored = kept * (1 + self.saving.copies) * self.total
        links = self.ranks * self.links["network"].bandwidth
        if links < self.storage:
            rate = f"{links / 1e9:g} GB/s, the links of {self.ranks} rank(s) ({self.links.source})"
        else:
            known = f"the peak of {self.machine.name}'s file system" if self.machine.storage else "assumed for storage"
            rate = f"{self.storage / 1e9:g} GB/s, {known}"
        return (
            f"Checkpoint: {size_text(self.total)} of all ranks together ({kinds_text(large)}); "
            + (f"{size_text(stored)} for the {kept} that are kept" if kept else "all are kept")
            + (f", with copies on {self.saving.copies} other node(s)" if self.saving.copies else "")
            + f", and one more while it is written. At least {seconds_text(self.seconds)} to write: {rate}"
        )

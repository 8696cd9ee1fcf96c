"""A run as the planner sees it: method, optimizer, cost, and size of a checkpoint. Plain arithmetic: no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_scape.core.text import kinds_text, seconds_text, size_text
from torchtitan_scape.core.workloads import LocalModel, Workload, local_shapes
from torchtitan_scape.methods.options import DenseOptions, MethodOptions
from torchtitan_scape.optimizers.cost import get_optimizer_cost
from torchtitan_scape.topology.machines import ASSUMED_STORAGE, Links, Machine


@dataclass(frozen=True)
class PlannedRun:
    """A method with its options, the optimizer behind it, and the overlap of its exchange.

    Attributes:
        optimizer: `[optimizer] name`.
        overlap: The exchange runs during the last backward pass of a step and, if it ends with changes of the weights,
            the next forward pass: `[sync] overlap`.

    Raises:
        ValueError: The optimizer is unknown, or the method does not support overlap.
    """

    options: MethodOptions
    optimizer: str = "AdamS"
    overlap: bool = False

    def __post_init__(self) -> None:
        get_optimizer_cost(self.optimizer)
        object.__setattr__(self, "options", self.options.for_optimizer(self.optimizer))
        if self.overlap and not self.options.supports_overlap():
            raise ValueError(
                f"{self.options.method_name()} does not support overlap with these options; overlap must be False"
            )

    def __hash__(self) -> int:
        return hash((repr(self.options), self.optimizer, self.overlap))

    @property
    def is_dense(self) -> bool:
        """Whether the method is the dense FP32 baseline."""
        return isinstance(self.options, DenseOptions)

    @property
    def name(self) -> str:
        """Name in tables and log lines: of dense training, the optimizer."""
        if self.is_dense:
            name = self.optimizer.lower()
        else:
            name = self.options.label() + ("" if self.optimizer == "AdamS" else f" with {self.optimizer.lower()}")
        name += " overlap" if self.overlap else ""
        offloaded = self.options.offloaded()
        return name + (f" offload {'+'.join(offloaded)}" if offloaded else "")

    def memory_traffic(self, model: LocalModel, replicas: int, several_levels: bool = False) -> tuple[float, float]:
        """Return the bytes that (the packing pass, the other passes) move, the optimizer's included.

        several_levels: Replicas span several link levels.
        """
        pack, rest = self.options.memory_traffic(model, replicas, several_levels, self.overlap and replicas > 1)
        if self.options.holds_optimizer_state:
            return pack, rest
        updated = self.options.updated_model(model, replicas).entries / len(self.options.update_groups(model))
        return pack, rest + get_optimizer_cost(self.optimizer).traffic(model) * updated / max(1, model.entries)

    def device_memory(self, model: LocalModel, replicas: int, several_levels: bool = False) -> dict[str, float]:
        """Return the bytes of parameters, gradients and all states on a rank's device, by kind."""
        kinds, options = {}, self.options
        if not options.holds_optimizer_state:
            state = get_optimizer_cost(self.optimizer).state(options.updated_model(model, replicas))
            kinds = {"parameters": 4.0 * model.entries, "gradients": 4.0 * model.entries}
            kinds |= {"state": state} if state else {}
        kinds |= options.held_memory(model, replicas)
        kinds |= options.temporary_memory(model, replicas, several_levels, self.overlap)
        return kinds

    def total_memory(
        self, workload: Workload, shard: int, replicas: int, micro_batch: int, several_levels: bool = False
    ) -> dict[str, float]:
        """Return the estimated bytes on a rank's device, by kind: `device_memory`, FSDP's copy and activations."""
        kinds = self.device_memory(workload.local(shard), replicas, several_levels)
        kinds["working copy"] = workload.working_bytes(shard)
        return kinds | {"activations": workload.activation_bytes(micro_batch)}

    def simulated_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the bytes of a process that simulates all replicas, by kind, without activations and FSDP's copy.

        Every replica has gradients, states and messages of its own. Parameters and the optimizer's state are common,
        unless the replicas' weights differ; dense gradients are summed before the method runs.
        """
        kinds, options = self.device_memory(model, replicas), self.options
        if self.is_dense:
            return kinds
        common: tuple[str, ...] = ("parameters", "state")
        if options.per_replica_weights:
            common = ()
        elif options.holds_optimizer_state or options.divides_update:
            common = ("parameters",)
        return {kind: (1 if kind in common else replicas) * nbytes for kind, nbytes in kinds.items()}


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


def checkpoint_bytes(
    run: PlannedRun, model: LocalModel, replicas: int, residual: str = "exact", shards: int = 1
) -> dict[str, float]:
    """Return the bytes of a checkpoint of all ranks by kind.

    Args:
        model: Whole parameters.
        residual: `[checkpoint] residual`.
        shards: Ranks of the shard axis, whose shards have bases of their own.
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
        local = LocalModel(model.names, local_shapes(model.shapes, shards), model.hidden_names)
        sizes["moments"] = get_optimizer_cost(run.optimizer).state(model)
        sizes |= {"unsent_update": 4.0 * model.entries, "bases": shards * options.basis_memory(local, replicas)}
    if residual != "drop":
        # Residuals of a divided update are in BF16, and their mean in FP32.
        width = 2 if options.divides_update and residual == "mean" else 1
        sizes |= {kind: width * rows * kinds.get(kind, 0.0) for kind in _PENDING}
    sizes["outer momentum"] = kinds.get("outer momentum", 0.0)
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

"""A training run as the planner sees it: method, optimizer, and their cost together. Plain arithmetic: no torch."""

from dataclasses import dataclass

from torchtitan_scape.core.workloads import LocalModel, Workload
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.optimizers.cost import get_optimizer_cost


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
        return kinds | {"working copy": workload.working_bytes(), "activations": workload.activation_bytes(micro_batch)}

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

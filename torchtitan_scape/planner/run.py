"""A training run as the planner sees it: method, optimizer, and their cost together. Plain arithmetic: no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_scape.core.workloads import LocalModel, Workload, count_entries
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.optimizers.cost import get_optimizer_cost
from torchtitan_scape.topology.calls import CollectiveCall
from torchtitan_scape.topology.ring_bytes import LevelSize


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
        if self.overlap and not self.options.cost().supports_overlap:
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

    def collective_calls(self, model: LocalModel, levels: Sequence[LevelSize]) -> list[CollectiveCall]:
        """Return the collectives of a step over the replicas."""
        return self.options.cost().collective_calls(model, levels)

    def memory_traffic(self, model: LocalModel, replicas: int, levels: int = 1) -> tuple[float, float]:
        """Return the bytes that (the packing pass, the other passes) move, the optimizer's included.

        levels: Link levels between the replicas.
        """
        cost = self.options.cost()
        pack, rest = cost.memory_traffic(model, replicas)
        if levels > 1:
            rest += cost.buffer_traffic(model, replicas)
        if self.overlap and replicas > 1:
            rest += cost.overlap_traffic(model, replicas)
        optimizer = 0.0 if cost.includes_optimizer else get_optimizer_cost(self.optimizer).traffic(model)
        return pack, rest + (cost.updated_share(model, replicas) * optimizer if optimizer else 0.0)

    def optimizer_flops(self, model: LocalModel, ranks: int, replicas: int) -> float:
        """Return the optimizer's matrix products in a step on the busiest rank, in floating-point operations.

        Args:
            model: Whole parameters.
            ranks: Ranks that divide the products.
            replicas: Number of replicas.
        """
        flops, cost = get_optimizer_cost(self.optimizer).flops, self.options.cost()
        if flops is None or cost.includes_optimizer:
            return 0.0
        groups = cost.update_groups(model)
        return (1.0 + cost.extra_orthogonalizations(replicas)) * sum(flops(g, ranks) for g in groups) / len(groups)

    def device_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the bytes of parameters, gradients and all states on a rank's device, by kind."""
        cost, kinds = self.options.cost(), self._optimizer_memory(model)
        if "state" in kinds:
            kinds["state"] = get_optimizer_cost(self.optimizer).state(cost.updated_model(model, replicas))
        kinds |= cost.device_memory(model, replicas)
        kinds |= self._round_memory(model, replicas)
        if self.overlap and replicas > 1:
            kinds["chunks in flight"] = cost.overlap_memory(model, replicas)
        return kinds

    def total_memory(self, workload: Workload, shard: int, replicas: int, micro_batch: int) -> dict[str, float]:
        """Return the estimated bytes on a rank's device, by kind: `device_memory`, FSDP's copy and activations."""
        kinds = self.device_memory(workload.local(shard), replicas)
        return kinds | {"working copy": workload.working_bytes(), "activations": workload.activation_bytes(micro_batch)}

    def simulated_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the bytes of a process that simulates all replicas, by kind, without activations and FSDP's copy."""
        kinds = self.options.cost().simulated_memory(model, replicas, self._optimizer_memory(model))
        return kinds | {kind: replicas * nbytes for kind, nbytes in self._round_memory(model, replicas).items()}

    def host_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the bytes in host memory, by kind."""
        return self.options.cost().host_memory(model, replicas)

    def host_link_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return the bytes that (the packing pass, the other passes) copy between device and host."""
        return self.options.cost().host_link_traffic(model, replicas)

    def _round_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the bytes of the sum of a round's steps."""
        if self.optimizer != "Muon" or not self.options.cost().extra_orthogonalizations(replicas):
            return {}
        return {"round steps": 4.0 * count_entries(model.hidden_shapes)}

    def _optimizer_memory(self, model: LocalModel) -> dict[str, float]:
        if self.options.cost().includes_optimizer:
            return {}
        return get_optimizer_cost(self.optimizer).device_memory(model)

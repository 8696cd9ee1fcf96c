"""Base class of the methods' TOML sections, and the cost formula that each of them provides. Imports no torch.

A file that defines a section must not use `from __future__ import annotations`, see `core.options`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from torchtitan_scape.core.options import Options
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.topology.calls import CollectiveCall
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.ring_bytes import LevelSize


class MethodCost(Protocol):
    """Cost of a step after warm-up, in bytes, without the optimizer (`optimizers/cost.py`).

    `model` has the names and shapes of this rank's shards.

    Attributes:
        includes_optimizer: The method updates the parameters itself: `memory_traffic` and `device_memory` contain
            parameters, gradients and the optimizer's state.
        per_replica_weights: As in `Method`: every replica runs the optimizer on its own gradients.
        divides_update: Each replica runs the optimizer on its share of the parameters; otherwise on all of them.
        supports_overlap: The exchange can run during the last backward pass of a step.
        sends_weights: It ends with all-gathers of changes of the weights, which then run during the next forward pass.
        compresses: A step sends less than dense gradients.
        scalar_reductions: All-reduces of a scalar that a step waits for.
    """

    @property
    def includes_optimizer(self) -> bool: ...

    @property
    def per_replica_weights(self) -> bool: ...

    @property
    def divides_update(self) -> bool: ...

    @property
    def supports_overlap(self) -> bool: ...

    @property
    def sends_weights(self) -> bool: ...

    @property
    def compresses(self) -> bool: ...

    @property
    def scalar_reductions(self) -> int: ...

    def extra_orthogonalizations(self, replicas: int) -> float:
        """Return how often per step Muon's matrices are orthogonalized besides Muon's own step.

        A sum of steps of these matrices is then a state.
        """

    def update_groups(self, model: LocalModel) -> Sequence[LocalModel]:
        """Return the parameters of a model that the optimizer updates in each step of a round."""

    def matrix_flops(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return the floating-point operations of the exchange's matrix products in a step, on this rank: (TF32, FP32).

        On devices without TF32 all are in FP32.
        """

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = 0
    ) -> list[CollectiveCall]:
        """Return the collectives of a step, in their order.

        Args:
            levels: Levels that the replicas span, innermost first; none for a single replica.
            chunk_entries: Maximum elements of a chunk; 0 for those of `topology.partition.chunk_limit`.
        """

    def updated_share(self, model: LocalModel, replicas: int) -> float:
        """Return the share of the entries that a step of a replica's optimizer updates; 1 unless it is divided."""

    def updated_model(self, model: LocalModel, replicas: int) -> LocalModel:
        """Return what the optimizer of the busiest replica has: the model, unless replicas divide the update."""

    def memory_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return the traffic of (the packing pass, the other passes) of a step: each input and output counts once."""

    def buffer_traffic(self, model: LocalModel, replicas: int) -> float:
        """Return the bytes that an exchange over several link levels moves in addition, through buffers."""

    def overlap_traffic(self, model: LocalModel, replicas: int) -> float:
        """Return the memory traffic that an exchange during the backward pass adds to a step."""

    def overlap_memory(self, model: LocalModel, replicas: int) -> float:
        """Return the bytes of all chunks that an exchange during the backward pass has in flight at once."""

    def device_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the memory on the device, by kind."""

    def host_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the memory on the host, by kind."""

    def host_link_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return the bytes that (the packing pass, the other passes) copy between device and host, in both directions.

        Both directions are added.
        """

    def simulated_memory(self, model: LocalModel, replicas: int, optimizer: dict[str, float]) -> dict[str, float]:
        """Return the device memory of a process that simulates all replicas, by kind, the optimizer included.

        Args:
            optimizer: Memory of the optimizer on one rank, by kind.
        """


@dataclass
class MethodOptions(Options):
    """TOML section of one method; the only place where its options are declared."""

    main_options: ClassVar[tuple[str, ...]] = ()  # options that determine the bytes sent; the planner prints them

    @classmethod
    def method_name(cls) -> str:
        """Return the name of the method in `[sync] method`."""
        return cls.section.removeprefix("sync.")

    def cost(self) -> MethodCost:
        """Return the cost of the method with these options."""
        raise NotImplementedError

    def resolve(self, shapes: Sequence[Sequence[int]], replicas: int) -> Self:
        """Return the options with values chosen for this model.

        Args:
            shapes: Shapes of this rank's shards.

        Raises:
            ValueError: No value satisfies the options.
        """
        return self

    def for_optimizer(self, name: str) -> Self:
        """Return the options without those that have no effect with an optimizer, `[optimizer] name`."""
        return self

    def resolve_for_links(self, shapes: Sequence[Sequence[int]], layout: Layout, rank: int, levels: int) -> Self:
        """Return the options with defaults chosen for the links between replicas.

        Args:
            shapes: Shapes of this rank's shards.
            layout: Layout of the run, simulated replicas included.
            rank: This rank.
            levels: Number of link levels for which communicators were built.
        """
        return self

    def needs_comm_streams(self) -> bool:
        """Return whether an exchange on a single level has several stages and therefore needs comm streams."""
        return False

    def delays_exchanges(self) -> bool:
        """Return whether an exchange is in flight during the following steps."""
        return False

    def simulation_error(self) -> str:
        """Return why simulated replicas do not support these options; "" if they do."""
        return ""

    def steps_per_round(self) -> int:
        """Return the number of steps in which every parameter is exchanged and its result applied."""
        return 1

    def label(self) -> str:
        """Return the method and its main options, for tables and log lines."""
        return self.method_name()

    def offloaded(self) -> tuple[str, ...]:
        """Return the states that are kept in host memory."""
        return ()

    def without_memory_savings(self) -> Self:
        """Return the options with replicated updates, FP32 weights and all states on the device."""
        return self

"""Shared parts of the methods' cost formulas, see `methods.options.MethodCost`. Imports no torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.calls import ChunkedMessages, CollectiveCall, chunked_size, padded_size, replicas_of
from torchtitan_scape.topology.partition import CHUNK_ENTRIES, chunk_limit, chunk_sizes
from torchtitan_scape.topology.ring_bytes import LevelSize, MessageBytes


class GradientCost:
    """Defaults for a method that synchronizes gradients before the optimizer's update.

    Subclasses define `collective_calls` and `traffic_per_parameter`.
    """

    includes_optimizer: ClassVar[bool] = False
    per_replica_weights: ClassVar[bool] = False
    divides_update: ClassVar[bool] = False
    supports_overlap: ClassVar[bool] = False
    sends_weights: ClassVar[bool] = False
    compresses: ClassVar[bool] = True
    scalar_reductions: ClassVar[int] = 1  # the finite flag
    residual_bytes: ClassVar[float] = 4.0  # of an entry
    # Kinds of memory that a process with simulated replicas allocates once per replica.
    per_replica: ClassVar[tuple[str, ...]] = (
        "gradients",
        "residual",
        "owner_error",
        "bases",
        "masks",
        "messages",
        "chunks in flight",
    )

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = 0
    ) -> list[CollectiveCall]:
        raise NotImplementedError

    def traffic_per_parameter(self) -> float:
        """Return the memory traffic of the method's passes in bytes per parameter, without the optimizer."""
        return 0.0

    def overlap_traffic(self, model: LocalModel, replicas: int) -> float:
        return 0.0

    def overlap_memory(self, model: LocalModel, replicas: int) -> float:
        """Return the bytes of the gradients, and of the quantization errors if these are kept."""
        return (8.0 if self.residual_entries(model) else 4.0) * model.entries

    def buffer_traffic(self, model: LocalModel, replicas: int) -> float:
        return 0.0

    def memory_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        return 0.0, self.traffic_per_parameter() * model.entries

    def extra_orthogonalizations(self, replicas: int) -> float:
        return 0.0

    def update_groups(self, model: LocalModel) -> Sequence[LocalModel]:
        return [model]

    def matrix_flops(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        return 0.0, 0.0

    def updated_share(self, model: LocalModel, replicas: int) -> float:
        return 1.0

    def updated_model(self, model: LocalModel, replicas: int) -> LocalModel:
        return model

    def residual_entries(self, model: LocalModel) -> int:
        """Return the entries of the error-feedback residual."""
        return 0

    def message_memory(self, model: LocalModel, replicas: int) -> float:
        """Return the bytes of gathered messages and packed values: each replica stores the messages of all replicas."""
        return replicas * gathered_bytes(self, model, replicas)

    @property
    def chunk_bytes(self) -> float:
        """Bytes of an entry of a chunk in flight, copies and messages included."""
        return 4.0

    def chunk_memory(self, model: LocalModel, replicas: int) -> float:
        """Return the bytes of the two chunks of an all-reduce that are in flight at once."""
        return self.chunk_bytes * entries_in_flight(self, model, replicas)

    def device_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        residual = self.residual_bytes * self.residual_entries(model)
        kinds = {"residual": residual, "messages": self.message_memory(model, replicas)}
        kinds["chunks in flight"] = self.chunk_memory(model, replicas)
        return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}

    def host_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        return {}

    def host_link_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        return 0.0, 0.0

    def simulated_memory(self, model: LocalModel, replicas: int, optimizer: dict[str, float]) -> dict[str, float]:
        kinds = optimizer | self.device_memory(model, replicas)
        return {kind: (replicas if kind in self.per_replica else 1) * nbytes for kind, nbytes in kinds.items()}


def entries_in_flight(cost: GradientCost, model: LocalModel, replicas: int) -> int:
    """Return the entries of the largest two chunks that one all-reduce or pair exchange has in flight at once."""
    if replicas < 2:
        return 0
    calls = cost.collective_calls(model, [LevelSize("network", replicas)])
    reductions = [call for call in calls if call.kind in ("all_reduce", "pair_mean")]
    return max((min(2, c.chunks) * c.largest_chunk if c.chunks else c.count for c in reductions), default=0)


def gathered_bytes(cost: GradientCost, model: LocalModel, replicas: int) -> int:
    """Return the bytes of one replica's messages of all all-gathers."""
    calls = cost.collective_calls(model, [LevelSize("network", replicas)])
    return sum(call.count for call in calls if call.kind == "all_gather")


def all_reduce_chunked(
    entries: int, levels: Sequence[LevelSize], chunk_entries: int = 0, share: float = 1.0
) -> CollectiveCall:
    """Return the call of `ReplicaCollectives.all_reduce_chunked` on FP32 entries."""
    limit = chunk_entries or chunk_limit(entries, replicas_of(levels))
    chunks = -(-entries // limit)
    largest = padded_size(min(entries, limit), levels)
    size = chunked_size(entries, levels, limit)
    return CollectiveCall("all_reduce", size, share=share, chunks=chunks, largest_chunk=largest)


def pair_mean_chunked(
    entries: int, levels: Sequence[LevelSize], chunk_entries: int = 0, share: float = 1.0
) -> CollectiveCall:
    """Return the call of `ReplicaCollectives.pair_mean_chunked` on FP32 entries."""
    return replace(all_reduce_chunked(entries, levels, chunk_entries or CHUNK_ENTRIES, share), kind="pair_mean")


def all_reduce_stream(
    sizes: Sequence[int],
    levels: Sequence[LevelSize],
    chunk_entries: int = 0,
    block: int = 1,
    message_bytes: MessageBytes | None = None,
    share: float = 1.0,
    entries: int = 0,
    in_place: bool = False,
) -> CollectiveCall:
    """Return the all-reduce of tensors that are sent in the chunks of `topology.partition.chunks_of`.

    Args:
        sizes: Entries of the tensors.
        block: Each tensor starts at a multiple of this size, and no chunk divides a block.
        message_bytes: Encoded size of n elements of one chunk; None for FP32.
        entries: Entries that the size of the chunks depends on; 0 for those of the tensors.
        in_place: Entries are encoded without a buffer if there is one level.
    """
    one_level, replicas = in_place and len(levels) == 1, replicas_of(levels)
    limit = chunk_entries or chunk_limit(entries or sum(sizes), replicas, message_bytes, one_level)
    size = None if message_bytes is None else block
    chunks = Counter(padded_size(n, levels, size) for n in chunk_sizes(sizes, limit, block))
    count = sum(n * times for n, times in chunks.items())
    encoded = None if message_bytes is None else ChunkedMessages(message_bytes, tuple(chunks.items()))
    largest = max(chunks, default=0)
    return CollectiveCall("all_reduce", count, encoded, share, chunks=chunks.total(), largest_chunk=largest)


def scaled(calls: Sequence[CollectiveCall], share: float, hidden: bool = False) -> list[CollectiveCall]:
    """Return the calls of an exchange that runs in only a share of the steps."""
    return [replace(call, share=share * call.share, hidden=hidden) for call in calls]


def share_of_dense(options: MethodOptions, model: LocalModel, replicas: int) -> float:
    """Return the bytes that a replica sends per step, masks and scales included, relative to dense FP32 gradients.

    Every replica is assumed to be on its own node; a single replica is counted as one of two.
    """
    levels = [LevelSize("network", max(2, replicas))]
    calls = options.cost().collective_calls(model, levels)
    sent = sum(stage.sent for call in calls for stage in call.stages(levels))
    dense = 2.0 * (levels[0].size - 1) / levels[0].size * 4.0 * model.entries
    return sent / dense if dense else 0.0

"""Options of SPARTA."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.kernels.codec.formats import encoded_size
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.traffic import CollectiveCall, Levels, all_reduce_stream, replicas_of

BLOCK = 128  # entries that are exchanged together and share a scale
# With more replicas the owner's error is a separate state, and one bit is unbiased.
MANY_REPLICAS = 4


@dataclass
class SpartaOptions(MethodOptions):
    """[sync.sparta]: local steps and an average of a few entries per step."""

    section: ClassVar[str] = "sync.sparta"
    main_options = ("interval", "code")
    per_replica_weights = True

    interval: int = 3
    """Steps in which every parameter is averaged once: each step averages one of `interval` blocks of 128 entries"""

    code: Literal["auto", "float32", "int8", "int4", "e2m1", "2bit", "1bit", "1bit_unbiased"] = "auto"
    """Encoding of the displacements, in both directions: FP32, or a code with blocks of 128; "auto" is 1bit with up to
    4 replicas and 1bit_unbiased with more. The quantization error stays in the replica's parameters until the block's
    next exchange"""

    warmup_steps: int = -1
    """Steps at the start that average more blocks: all in the first one, then exponentially fewer; 0 for none, -1 for
    5 % of training.steps"""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "it must be 0 or more, or -1 for 5 % of training.steps"
        self.require(self.warmup_steps >= -1, "warmup_steps", rule)
        self.require(self.interval >= 1, "interval", "it must be 1 or more")

    def needs_comm_streams(self) -> bool:
        return self.code != "float32"

    def steps_per_round(self) -> int:
        return self.interval

    def label(self) -> str:
        code = {"auto": " 1bit", "float32": ""}.get(self.code, f" {self.code}")
        return f"{self.method_name()} {self.interval:g}{code}"

    def keeps_owner_error(self, replicas: int) -> bool:
        """Return whether the owner's error is a separate state. In the parameters, that of "1bit_unbiased" diverges."""
        if replicas == 1 or self.code == "float32":
            return False
        return replicas > MANY_REPLICAS or self.encoding(replicas) == "1bit_unbiased"

    def encoding(self, replicas: int) -> str:
        """Return the code that `code` stands for."""
        automatic = "1bit_unbiased" if replicas > MANY_REPLICAS else "1bit"
        return automatic if self.code == "auto" else self.code

    def collective_calls(self, model: LocalModel, levels: Levels, chunk_entries: int = 0) -> list[CollectiveCall]:
        """Return one all-reduce for each block group, of which a step has one."""
        encoded, share = encoded_size(self.encoding(replicas_of(levels)), BLOCK), self.exchange_share()
        calls = []
        for group in range(self.interval):
            sizes = [one.entries for one in slices_of_group(model.sizes, self.interval, group)]
            calls.append(all_reduce_stream(sizes, levels, chunk_entries, BLOCK, encoded, share, model.entries))
        return calls

    def exchange_share(self) -> float:
        return 1.0 / self.interval


class GroupSlice(NamedTuple):
    """The blocks `first`, `first` + interval, ... of a shard with `entries` in total; the last may be shorter."""

    shard: int
    first: int
    entries: int


def count_blocks(sizes: Sequence[int]) -> int:
    """Return the number of blocks of shards with these sizes."""
    return sum(-(-size // BLOCK) for size in sizes)


def slices_of_group(sizes: Sequence[int], interval: int, group: int, first_block: int = 0) -> list[GroupSlice]:
    """Return the slice of each shard that a block group contains.

    The blocks of all shards are numbered consecutively from `first_block`. Block i belongs to group i modulo
    `interval`.
    """
    slices, begin = [], first_block
    for shard, size in enumerate(sizes):
        blocks = -(-size // BLOCK)
        first = (group - begin) % interval
        if own := len(range(first, blocks, interval)):
            ends_short = (blocks - 1 - first) % interval == 0
            slices.append(GroupSlice(shard, first, own * BLOCK - (blocks * BLOCK - size if ends_short else 0)))
        begin += blocks
    return slices

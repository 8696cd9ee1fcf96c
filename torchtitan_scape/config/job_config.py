"""The TOML sections that this project adds to TorchTitan's.

No `from __future__ import annotations` here: TorchTitan tells sections apart by `is_dataclass(field.type)`.
"""

from dataclasses import dataclass, field, make_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from topology.machines import MACHINES
from torchtitan_scape.core.options import Options
from torchtitan_scape.core.type_checks import check_section
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.sharding.options import ShardingOptions
from torchtitan_scape.titan.config import Checkpoint as TitanCheckpoint
from torchtitan_scape.titan.config import JobConfig as TitanJobConfig


@dataclass
class _Sync(Options):
    """[sync]: who synchronises the replicas."""

    section: ClassVar[str] = "sync"

    flush_at_end: bool = False
    """Make the last step's exchange whole, so that no residual is left unsent; its norm is reported in any case"""

    max_skipped_steps: int = 10
    """So many steps in a row with a non-finite gradient on any rank stop the run"""

    consistency_interval: int = 100
    """Every so many steps, and before every checkpoint, replicas compare what must be equal on them to the last bit
    (parameters, and what their method keeps that is not a replica's own); 0 for never"""

    on_inconsistency: Literal["stop", "repair"] = "stop"
    """Where they differ: end the run with exit code 3, or overwrite what differs by what most replicas hold; without a
    majority, as with two replicas, "repair" stops too"""

    overlap: bool = False
    """Gradients go out while the last backward pass of a step leaves them (dense, quantized), with the same bits as
    after it, for 4 bytes a parameter more, or 8 with what a code loses. Simulated replicas have nobody to send to, give
    these bits too, and ignore it"""

    kernels: Literal["auto", "triton", "torch"] = "auto"
    """What runs the optimizer's passes: Triton kernels or PyTorch; "auto" takes Triton on a GPU"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.max_skipped_steps >= 1, "max_skipped_steps", "it must be 1 or more")
        self.require(self.consistency_interval >= 0, "consistency_interval", "it must be 0 (never) or more")


if TYPE_CHECKING:

    class Sync(_Sync):
        method: str
        scape: ScapeOptions

else:
    # `method`, and a section for each of the registry's.
    Sync = make_dataclass(
        "Sync",
        [
            ("method", Literal[tuple(METHODS)], field(default="scape")),
            *((name, entry.options, field(default_factory=entry.options)) for name, entry in METHODS.items()),
        ],
        bases=(_Sync,),
        namespace={"__doc__": _Sync.__doc__},
    )


def options_of(sync: Sync) -> MethodOptions:
    """The section of the method that `[sync]` names."""
    found: MethodOptions = getattr(sync, sync.method)
    return found


@dataclass
class Topology(Options):
    """[topology]: where ranks sit."""

    section: ClassVar[str] = "topology"

    machine: Literal["auto", "vista", "frontier", "dgx-a100", "ethernet-10g", "local"] = "auto"
    """Preset of links and ranks per node; "auto" looks at the device's name"""

    ranks_per_node: int = 0
    """0 takes what the launcher says (LOCAL_WORLD_SIZE or Slurm), else the preset's"""

    exchange: Literal["hierarchical", "flat"] = "hierarchical"
    """Replicas talk level by level (each byte crosses the network once per node), or in one ring over all of them"""

    simulate_replicas: int = 1
    """One process (or group of shards) is so many replicas, one after the other; 1 for real ones.

    The run is that of as many ranks, a replica a node in one ring: every replica reads its own data and has its own
    residual; log and summary predict its step time on `machine`. A step takes global_batch_size sequences, by default
    local_batch_size x data-parallel ranks x replicas. Memory: SCAPE keeps a state and a gradient of every replica, 4
    bytes a parameter each, 8 x replicas in all: the gradients because no state may be written before all of them are
    known to be finite. Dense training keeps one of each, its gradients being added up.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.ranks_per_node >= 0, "ranks_per_node", "it must be 0 (automatic) or more")
        self.require(self.simulate_replicas >= 1, "simulate_replicas", "it must be 1 (real replicas) or more")
        assert {"auto", *MACHINES} == set(get_args(type(self).__dataclass_fields__["machine"].type))


@dataclass
class Checkpoint(TitanCheckpoint):
    """[checkpoint]: TorchTitan's, and what it needs for state that differs from replica to replica."""

    residual: Literal["exact", "mean", "drop"] = "exact"
    """What is saved of the residuals, which every replica has of its own: all of them (4 bytes a parameter and replica;
    resuming is exact), their mean (nothing is lost, but replicas select otherwise than they would have; that of SCAPE
    has room in the first moment), or nothing (saves the mean's exchange; what was not sent is lost)"""

    fallback: bool = True
    """Where the newest checkpoint is damaged, the newest whole one before it is taken, and said; false stops the run"""

    def __post_init__(self) -> None:
        check_section(self, "checkpoint")


@dataclass
class Data(Options):
    """[data]: how text becomes tokens, and how long the training data last."""

    section: ClassVar[str] = "data"

    epochs: int = 0
    """So many passes over the training data, then the run ends, on all ranks as soon as one has no full step left; 0
    begins again for as long as training.steps asks"""

    border: Literal["bos_eos", "eos"] = "bos_eos"
    """What stands between documents: BOS in front of each and EOS after it, or EOS alone; where both are one token, as
    GPT-2's, it is written once either way. Prepared data have to have been prepared with the same"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.epochs >= 0, "epochs", "it must be 0 (no end) or more")


@dataclass
class Sample(Options):
    """[sample]: what the model writes, for a person to judge."""

    section: ClassVar[str] = "sample"

    characters: int = 0
    """At the end of a run so many characters of generated text are logged, the likeliest token each time and at
    temperature 0.8, the same for one seed; 0 for none"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.characters >= 0, "characters", "it must be 0 (none) or more")


@dataclass
class Observe(Options):
    """[observe]: gradients and first moments of a few tensors, as Section III of the SCAPE paper looks at them."""

    section: ClassVar[str] = "observe"

    enable: bool = False
    """Write observations.npz in the dump folder, and TensorBoard's observe/: histograms, norms and overlaps, and no
    entry of any tensor. Training stays what it is, bit for bit"""

    windows: list[list[int]] = field(default_factory=lambda: [[1, 100], [10000, 100]])
    """[first step, how many] each: there the largest first moments are compared with those of the step before, and the
    norms are taken of what is sent and of what is left; --observe.windows=[[1,100],[10000,100]] on the command line"""

    histograms: list[int] = field(default_factory=lambda: [1000, 50000])
    """Steps at which gradients are counted into histograms"""

    density: float = 0.1
    """Share of a tensor's entries that are its largest, in (0, 1]"""

    names: list[str] = field(default_factory=list)
    """Patterns of parameters, "*" for anything; each is a tensor of its own, those with + between them are one together
    ("layers.0.attention.wq.weight+layers.0.attention.wk.weight"). None: the paper's, in layers of the same depth"""

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = all(len(window) == 2 and min(window) >= 1 for window in self.windows)
        self.require(pairs, "windows", "each must be [first step, how many], both 1 or more")
        ends = sorted((first, first + count - 1) for first, count in self.windows)
        disjoint = all(end < begin for (_, end), (begin, _) in pairwise(ends))
        self.require(disjoint, "windows", "they must not overlap")
        self.require(all(step >= 1 for step in self.histograms), "histograms", "steps are counted from 1")
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.1")

    def check(self, steps: int) -> None:
        """Against the steps of the run. Raises ValueError for what lies beyond."""
        if not self.enable:
            return
        self.require(bool(self.windows or self.histograms), "windows", "with histograms = [] nothing is observed")
        beyond = [f"window {window}" for window in self.windows if window[0] > steps]
        beyond += [f"histogram at {step}" for step in self.histograms if step > steps]
        if beyond:
            raise ValueError(
                f"[observe] {beyond[0]} lies beyond the run's {steps} steps; set windows and histograms to steps of "
                "the run, or to []"
            )


@dataclass
class JobConfig(TitanJobConfig):
    """TorchTitan's configuration with [sync], [sharding], [topology], [data], [sample], [observe], and more under
    [checkpoint]."""

    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    sync: Sync = field(default_factory=Sync)
    topology: Topology = field(default_factory=Topology)
    data: Data = field(default_factory=Data)
    sample: Sample = field(default_factory=Sample)
    observe: Observe = field(default_factory=Observe)
    sharding: ShardingOptions = field(default_factory=ShardingOptions)

"""The TOML sections that this project adds to TorchTitan's.

No `from __future__ import annotations` here: TorchTitan recognizes sections by `is_dataclass(field.type)`.
"""

from dataclasses import dataclass, field, fields, make_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from torchtitan_scape.core.options import Options
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.sharding.options import ShardingOptions
from torchtitan_scape.titan.config import Checkpoint as TitanCheckpoint
from torchtitan_scape.titan.config import JobConfig as TitanJobConfig
from torchtitan_scape.titan.config import Model as TitanModel
from torchtitan_scape.titan.config import Optimizer as TitanOptimizer
from torchtitan_scape.titan.config import Training as TitanTraining
from torchtitan_scape.topology.machines import MACHINES

CUSTOM = "custom"  # the flavor without sizes of its own
# Far beyond any model that is trained; a larger value is a typing error, and would overflow or take minutes to build.
_LARGEST = {"n_layers": 10_000, "rope_theta": 1e12}
_LARGEST_SIZE = 2**24


@dataclass
class ModelSizes(Options):
    """[model.sizes]: sizes that override those of the flavor. Keys that are 0 keep the flavor's value. The flavor
    "custom" has no sizes of its own: it needs dim, n_layers, n_heads and vocab_size.
    """

    section: ClassVar[str] = "model.sizes"

    dim: int = 0
    """Width of the model"""

    n_layers: int = 0
    """Number of layers"""

    n_heads: int = 0
    """Attention heads, a divisor of dim"""

    n_kv_heads: int = 0
    """Heads of keys and values, a divisor of n_heads; by default of "custom" n_heads. Not for gpt2"""

    ffn_dim: int = 0
    """Width of the feed-forward layer. If it is 0, it follows from dim: for llama3 by TorchTitan's rule with the
    flavor's factors (8/3 of dim, rounded up to a multiple of 256, for "custom"), for gpt2 it is 4 times dim, always"""

    vocab_size: int = 0
    """Rows of the token embedding: at least the entries of the tokenizer"""

    positions: int = 0
    """Rows of the position embedding of gpt2 (1024 for "custom"), the maximum of seq_len. Not for llama3"""

    rope_theta: float = 0.0
    """Base of the rotary positions of llama3 (10000 for "custom"). Not for gpt2"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in fields(self):
            most = _LARGEST.get(key.name, _LARGEST_SIZE)
            rule = f"it must be positive and at most {most:.12g}, or 0 for the flavor's value"
            self.require(0 <= getattr(self, key.name) <= most, key.name, rule)

    def given(self) -> dict[str, Any]:
        """Return the sizes that are set, by key."""
        return {key.name: value for key in fields(self) if (value := getattr(self, key.name))}


@dataclass
class Model(TitanModel):
    """[model]: model, its size and its tokenizer. TorchTitan's keys, and `sizes`."""

    sizes: ModelSizes = field(default_factory=ModelSizes)

    @property
    def title(self) -> str:
        """Name, flavor and sizes, which identify the model in checkpoints, logs and messages."""
        given = ", ".join(f"{key} {value:.12g}" for key, value in self.sizes.given().items())
        return f"{self.name} {self.flavor}" + (f" ({given})" if given else "")


@dataclass
class _Sync(Options):
    """[sync]: choice of the method, and checks of the replicas."""

    section: ClassVar[str] = "sync"

    flush_at_end: bool = False
    """Make the exchange of the last step complete, so that no residual remains; its norm is logged in any case"""

    max_skipped_steps: int = 10
    """Stop the run after this number of consecutive steps with a non-finite gradient on any rank"""

    consistency_interval: int = 100
    """Interval in steps of the consistency check, which also runs before every checkpoint: replicas compare their
    replicated tensors (parameters, and the method's states that are not per replica) bit for bit; 0 for never"""

    on_inconsistency: Literal["stop", "repair"] = "stop"
    """Action if replicas differ: end the run with exit code 3 ("stop"), or overwrite the tensors that differ by those
    of the majority ("repair"); "repair" stops as well without a majority, as with two replicas"""

    overlap: bool = False
    """Overlap the exchange with the last backward pass of a step (dense, quantized, quantized_update), and changes of
    the weights of quantized_update with the next forward pass. The results are bitwise equal. It needs 4 bytes per
    parameter more, or 8 with error feedback. Simulated replicas ignore it"""

    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Implementation of the optimizer's passes: Triton kernels or PyTorch; "auto" selects Triton on a GPU"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.max_skipped_steps >= 1, "max_skipped_steps", "it must be 1 or more")
        self.require(self.consistency_interval >= 0, "consistency_interval", "it must be 0 (never) or more")


if TYPE_CHECKING:

    class Sync(_Sync):
        method: str
        scape: ScapeOptions

else:
    # `method`, and one section per method of the registry.
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
    """Return the section of the method that `[sync] method` selects."""
    options: MethodOptions = getattr(sync, sync.method)
    return options


@dataclass
class Topology(Options):
    """[topology]: placement of the ranks, and the links between them."""

    section: ClassVar[str] = "topology"

    machine: Literal["auto", "vista", "frontier", "dgx-a100", "dgx-h100", "dgx-h200", "ethernet-10g", "local"] = "auto"
    """Preset of links and ranks per node; "auto" selects it by the device's name"""

    links: str = ""
    """File of measured links, from torchtitan_scape.doctor, that replace those of the preset. Predictions,
    the division of Muon's work among replicas, and SCAPE's chunk size depend on them"""

    ranks_per_node: int = 0
    """Ranks per node; 0 uses the launcher's value (LOCAL_WORLD_SIZE or Slurm), otherwise the preset's"""

    exchange: Literal["hierarchical", "flat"] = "hierarchical"
    """Exchange level by level (each byte crosses the network once per node), or in one ring over all replicas"""

    simulate_replicas: int = 1
    """Number of replicas that one process (or one group of shards) simulates, one after the other; 1 for real replicas.

    The result is that of a run with one replica per node in a single ring: every replica reads its own data and has its
    own residual. Log and summary predict the step time on `machine`. A step consumes global_batch_size sequences, by
    default local_batch_size x data-parallel ranks x replicas. Memory: SCAPE stores a state and a gradient per replica,
    4 bytes per parameter each, 8 x replicas in total; all gradients are stored because no state may change before all
    of them are known to be finite. Dense training stores one of each, because gradients are summed.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.ranks_per_node >= 0, "ranks_per_node", "it must be 0 (automatic) or more")
        self.require(self.simulate_replicas >= 1, "simulate_replicas", "it must be 1 (real replicas) or more")
        assert {"auto", *MACHINES} == set(get_args(type(self).__dataclass_fields__["machine"].type))


@dataclass
class Checkpoint(TitanCheckpoint):
    """[checkpoint]: checkpoints, with the residuals of replicas. TorchTitan's keys and three others."""

    residual: Literal["exact", "mean", "drop"] = "exact"
    """Residuals in a checkpoint: those of every replica ("exact": 4 bytes per parameter and replica, bitwise resume),
    their mean ("mean": no gradient is lost, but replicas continue with other selections; SCAPE adds it to the first
    moment), or none ("drop": no exchange for the mean, but unsent gradients are lost)"""

    fallback: bool = True
    """If the newest checkpoint is damaged, load the newest intact one before it, with a warning; false stops the run"""

    copies: int = 0
    """0: all nodes share `folder`. From 1 on it is private to each node, on a local disk or in memory (/dev/shm): every
    node writes the files of its ranks, and sends them to this number of following nodes. A start needs one of these
    nodes for every file, and sends each node the files that it lacks"""


@dataclass
class Optimizer(TitanOptimizer):
    """[optimizer]: the optimizer and its rates. TorchTitan's keys, and `decay_exclude`."""

    decay_exclude: Literal["none", "vectors"] = "none"
    """Parameters without weight decay: "vectors" are those of one dimension, such as norms and biases. Megatron-LM
    excludes these; the papers' recipes exclude nothing"""


@dataclass
class Training(TitanTraining):
    """[training]: batches, steps and data. TorchTitan's keys, and `text_column`."""

    text_column: str = "text"
    """Column with the text, for the dataset "text_files" in training and validation"""


@dataclass
class Data(Options):
    """[data]: document separators and passes over the data."""

    section: ClassVar[str] = "data"

    epochs: int = 0
    """Passes over prepared data within which the run ends, if not earlier after training.steps; 0 repeats the data
    until training.steps"""

    border: Literal["bos_eos", "eos"] = "bos_eos"
    """Separation of documents: BOS before each and EOS after it, or EOS only; a tokenizer with one token for both, such
    as GPT-2's, writes it once in either case. Prepared data must have been prepared with the same value"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.epochs >= 0, "epochs", "it must be 0 (no end) or more")


@dataclass
class Observe(Options):
    """[observe]: statistics of gradients and first moments. They are those of Section III of the SCAPE paper."""

    section: ClassVar[str] = "observe"

    enable: bool = False
    """Write histograms, norms and overlaps to observations.npz in the dump folder and to TensorBoard (observe/); no
    tensor entries are written. Training is bitwise unchanged"""

    windows: list[list[int]] = field(default_factory=lambda: [[1, 100], [10000, 100]])
    """Windows [first step, number of steps] in which the indices of the largest first moments are compared with those
    of the previous step, and the norms of the sent and unsent parts are computed; on the command line
    --observe.windows=[[1,100],[10000,100]]"""

    histograms: list[int] = field(default_factory=lambda: [1000, 50000])
    """Steps with histograms of the gradients"""

    density: float = 0.1
    """Share of a tensor's entries that counts as the largest, in (0, 1]"""

    names: list[str] = field(default_factory=list)
    """Patterns of parameter names, "*" for any text; names joined by + are observed as one tensor
    ("layers.0.attention.wq.weight+layers.0.attention.wk.weight"). Empty: the paper's tensors, at the same relative
    depth"""

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = all(len(window) == 2 and min(window) >= 1 for window in self.windows)
        self.require(pairs, "windows", "each must be [first step, number of steps], both 1 or more")
        ends = sorted((first, first + count - 1) for first, count in self.windows)
        disjoint = all(end < begin for (_, end), (begin, _) in pairwise(ends))
        self.require(disjoint, "windows", "they must not overlap")
        self.require(all(step >= 1 for step in self.histograms), "histograms", "steps are counted from 1")
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.1")

    def check(self, steps: int) -> None:
        """Raise ValueError if a window or histogram is after the last of the run's `steps`."""
        if not self.enable:
            return
        self.require(bool(self.windows or self.histograms), "windows", "with histograms = [] nothing is observed")
        beyond = [f"window {window}" for window in self.windows if window[0] > steps]
        beyond += [f"histogram at {step}" for step in self.histograms if step > steps]
        if beyond:
            raise ValueError(
                f"[observe] {beyond[0]} is after the run's {steps} steps; set windows and histograms to steps of the "
                "run, or to []"
            )


@dataclass
class JobConfig(TitanJobConfig):
    """TorchTitan's configuration with this project's sections, and further keys of some of TorchTitan's."""

    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    training: Training = field(default_factory=Training)

    sync: Sync = field(default_factory=Sync)
    topology: Topology = field(default_factory=Topology)
    data: Data = field(default_factory=Data)
    observe: Observe = field(default_factory=Observe)
    sharding: ShardingOptions = field(default_factory=ShardingOptions)


def group_options(config: JobConfig) -> dict[str, bool]:
    """Return the arguments of `topology.groups.build_groups` that depend on the configuration."""
    options = options_of(config.sync)
    return {
        "hierarchical": config.topology.exchange == "hierarchical",
        "staged": options.needs_comm_streams(),
        "in_flight": config.sync.overlap or options.delays_exchanges(),
    }

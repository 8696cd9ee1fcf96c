"""Options of local updates: several local steps, then an exchange of displacements. Imports no torch.

A displacement is the difference between the shared anchor and the parameters of one replica. DiLoCo, Streaming DiLoCo
and SparseLoCo consist of their options, see `methods.local_updates`.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torchtitan_scape.core.options import FREE
from torchtitan_scape.core.workloads import LocalModel, layer_of
from torchtitan_scape.methods.options import DenseOptions, MethodOptions
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.methods.topk.options import TopkOptions
from torchtitan_scape.topology.traffic import CollectiveCall, Levels, scaled

Code = Literal["float32", "int8", "int4", "e2m1", "e3m0"]


@dataclass(frozen=True)
class FragmentSchedule:
    """The steps at which each fragment of the parameters is exchanged. Steps are attempted ones, from 1.

    Attributes:
        inner_steps: Steps per round. Every parameter is exchanged once per round.
        fragments: Number of fragments, which are exchanged one after the other.
        delay: Steps from the start of an exchange to the use of its result.
        mix: Weight of the replica's own parameter when a result is applied, in [0, 1).
        restart: Replicas continue from the anchor as soon as their displacements are sent, before results of earlier
            exchanges are used. `mix` then is 0.
    """

    inner_steps: int
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    restart: bool = False

    def is_due(self, fragment: int, step: int) -> bool:
        """Return whether the exchange of the fragment starts at this step."""
        return self.last_due(fragment, step) == step

    def last_due(self, fragment: int, step: int) -> int:
        """Return the last step up to `step` with an exchange of the fragment; 0 or less if there was none."""
        first = round((fragment + 1) * self.inner_steps / self.fragments)
        return step - (step - first) % self.inner_steps

    def fragment_of(self, name: str) -> int:
        """Return the fragment of a parameter.

        Layers are distributed over all fragments but the first; the first contains the other parameters.
        """
        layer = layer_of(name)
        return 0 if self.fragments == 1 or layer is None else 1 + layer % (self.fragments - 1)


@dataclass
class LocalOptions(MethodOptions):
    """Options of all methods with local updates; each section has its own defaults."""

    per_replica_weights = True

    inner_steps: int = 30
    """Local steps between two exchanges of a parameter"""

    outer_lr: float = 0.7
    """Constant learning rate of the outer step, which updates the shared anchor by the mean displacement"""

    outer_momentum: float = 0.9
    """Nesterov momentum of the outer step, in [0, 1); 0 for none"""

    host: bool = field(default=False, metadata=FREE)
    """Keep anchor and outer momentum in host memory: 8 bytes per parameter less on the device, 4 without momentum. They
    are read and written only at exchanges"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.inner_steps >= 1, "inner_steps", "it must be 1 or more")
        self.require(self.outer_lr > 0.0, "outer_lr", "it must be positive")
        self.require(0.0 <= self.outer_momentum < 1.0, "outer_momentum", "it must lie in [0, 1)")

    def schedule(self) -> FragmentSchedule:
        """Return the steps at which parameters are exchanged."""
        return FragmentSchedule(self.inner_steps)

    def averaging(self) -> MethodOptions:
        """Return the options of the gradient method that averages the displacements."""
        raise NotImplementedError

    def error_factor(self) -> float:
        """Return the factor on the errors that `averaging` keeps, before an exchange adds them."""
        return 1.0

    def stores_momentum(self) -> bool:
        """Return whether the outer momentum is a state."""
        return self.outer_momentum > 0.0

    def steps_per_round(self) -> int:
        return self.schedule().inner_steps + self.schedule().delay

    def needs_comm_streams(self) -> bool:
        return self.averaging().needs_comm_streams()

    def delays_exchanges(self) -> bool:
        return self.schedule().delay > 0

    def offloaded(self) -> tuple[str, ...]:
        return ("anchor",) if self.host else ()

    def collective_calls(self, model: LocalModel, levels: Levels, chunk_entries: int = 0) -> list[CollectiveCall]:
        """Return the exchanges of all fragments, each weighted by its share of the steps."""
        schedule, averaging = self.schedule(), self.averaging()
        calls: list[CollectiveCall] = []
        for number in range(schedule.fragments):
            fragment = model.select({name for name in model.names if schedule.fragment_of(name) == number})
            if fragment.names:  # a model may have fewer layers
                calls += averaging.collective_calls(fragment, levels, chunk_entries)
        return scaled(calls, self.exchange_share(), hidden=schedule.delay > 0)

    def exchange_share(self) -> float:
        return 1.0 / self.inner_steps

    def held_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the memory by kind.

        Displacements exist only during an exchange; with a delay there are also chunks in flight. With a restart an
        exchange starts while the result of the last one is still needed. Fragments are assumed to be of equal size.
        """
        schedule = self.schedule()
        displacements = 4.0 * model.entries / schedule.fragments
        states = {} if self.host else self._shared_states(model)
        states |= {"displacements": (1 + (schedule.delay > 0) + schedule.restart) * displacements}
        return states | self.averaging().held_memory(model, replicas)

    def host_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        return self._shared_states(model) if self.host else {}

    def host_link_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return the mean traffic over a round.

        The displacement reads the anchor; the outer step reads and writes all states on the host.
        """
        host = self.host_memory(model, replicas)
        return 0.0, (host.get("anchor", 0.0) + 2 * sum(host.values())) / self.inner_steps

    def _shared_states(self, model: LocalModel) -> dict[str, float]:
        """Return the bytes of anchor and outer momentum, on the device or on the host."""
        n = 4.0 * model.entries
        return {"anchor": n} | ({"outer momentum": n} if self.stores_momentum() else {})


@dataclass
class DilocoOptions(LocalOptions):
    """[sync.diloco]: local steps, then an average of displacements."""

    section: ClassVar[str] = "sync.diloco"
    main_options: ClassVar[tuple[str, ...]] = ("inner_steps", "code")

    code: Code = "float32"
    """Encoding of the displacements: FP32, or a code of blocks of 128 entries that share a scale"""

    decay: float = 0.0
    """Factor on the quantization error of a round, which is added to the next displacement, in [0, 1]; with 0 the error
    is dropped and needs no memory"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 <= self.decay <= 1.0, "decay", "it must lie in [0, 1]; 0 drops the error")
        coded = self.code != "float32" or not self.decay
        self.require(coded, "decay", "only a code has an error; set code, for example to 'e2m1', or decay to 0")

    def averaging(self) -> MethodOptions:
        if self.code == "float32":
            return DenseOptions()
        return QuantizedOptions(code=self.code, error_feedback=self.decay > 0.0)

    def error_factor(self) -> float:
        return self.decay or 1.0

    def label(self) -> str:
        return super().label() + (f", decay {self.decay:g}" if self.decay else "")


@dataclass
class StreamingDilocoOptions(DilocoOptions):
    """[sync.streaming_diloco]: DiLoCo, one fragment of the model at a time."""

    section: ClassVar[str] = "sync.streaming_diloco"
    main_options = ("inner_steps", "fragments", "delay", "code")

    inner_steps: int = 100
    """Steps per round; every parameter is exchanged once per round"""

    outer_lr: float = 0.4
    """Constant learning rate of the outer step, which updates the shared anchor by the mean displacement"""

    fragments: int = 5
    """Number of fragments, which are exchanged one after the other at equal intervals in a round: layers are
    distributed over all but the first, which contains the remaining parameters"""

    delay: int = 1
    """Steps from the start of an exchange to the use of its result, from 0 to inner_steps"""

    mix: float = 0.5
    """Weight of a replica's own parameters when a result is applied, in [0, 1); the anchor has the remaining weight"""

    code: Code = "e2m1"
    """Encoding of the displacements: FP32, or a code of blocks of 128 entries that share a scale"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.fragments >= 1, "fragments", "it must be 1 or more")
        self.require(
            0 <= self.delay <= self.inner_steps, "delay", f"it must lie in 0 .. inner_steps = {self.inner_steps}"
        )
        self.require(0.0 <= self.mix < 1.0, "mix", "it must lie in [0, 1)")

    def schedule(self) -> FragmentSchedule:
        return FragmentSchedule(self.inner_steps, self.fragments, self.delay, self.mix)


@dataclass
class SparselocoOptions(LocalOptions):
    """[sync.sparseloco]: local steps, then the largest displacements."""

    section: ClassVar[str] = "sync.sparseloco"
    main_options = ("inner_steps", "density", "code")

    outer_lr: float = 1.0
    """Constant learning rate of the outer step, which updates the shared anchor by the mean of the sent entries"""

    outer_momentum: float = 0.0
    """Nesterov momentum of the outer step, in [0, 1); 0 for none, because the residual has a similar effect"""

    density: float = 64 / 4096
    """Share of the entries that each replica sends, in (0, 1]: the largest of every 64 x 64 tile, or of every slice of
    4096 entries of one-dimensional parameters"""

    code: Literal["float32", "2bit"] = "2bit"
    """Encoding of the values: FP32, or two bits per value that select one of four means of the tensor. The quantization
    error is added to the residual"""

    decay: float = 0.95
    """Factor on the residual in every round, in (0, 1]"""

    divisor: Literal["replicas", "senders"] = "senders"
    """Divide sums by the number of replicas that sent the entry, as the published code does, or by the number of all
    replicas, as in the paper's equations; the outer step is then smaller by up to that factor"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.015625, 64 of 4096")
        self.require(0.0 < self.decay <= 1.0, "decay", "it must lie in (0, 1]")

    def averaging(self) -> MethodOptions:
        return TopkOptions(
            density=self.density, selection="tile", code=self.code, decay=self.decay, divisor=self.divisor
        )


@dataclass
class Co2Options(LocalOptions):
    """[sync.co2]: local steps, with an average that overlaps with the next round."""

    section: ClassVar[str] = "sync.co2"
    main_options = ("inner_steps",)

    inner_steps: int = 48
    """Local steps of a round. The exchange of a round runs during the next one"""

    outer_lr: float = 1.0
    """Constant learning rate of the outer step, which updates the shared anchor by the outer momentum"""

    outer_momentum: float = 0.2
    """Momentum of the outer step without Nesterov's correction, in [0, 1). The published code has 0 up to 16 replicas,
    0.2 up to 32, 0.5 up to 64 and 0.6 above"""

    gap_penalty: bool = True
    """Divide a mean displacement by the staleness gap: 1 plus the norm of the last outer step relative to that of the
    mean displacement"""

    momentum_clip: float = 1.0
    """Bound on the magnitude of every entry of the outer momentum; 0 for none"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.momentum_clip >= 0.0, "momentum_clip", "it must be 0 or more, with 0 for no bound")

    def schedule(self) -> FragmentSchedule:
        return FragmentSchedule(self.inner_steps, delay=self.inner_steps, restart=True)

    def averaging(self) -> MethodOptions:
        return DenseOptions()

    def stores_momentum(self) -> bool:
        return self.gap_penalty or super().stores_momentum()

    def host_link_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return the mean traffic over a round: the penalty reads the momentum once more."""
        each, mean = super().host_link_traffic(model, replicas)
        momentum = self.host_memory(model, replicas).get("outer momentum", 0.0)
        return each, mean + (momentum / self.inner_steps if self.gap_penalty else 0.0)

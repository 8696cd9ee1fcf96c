"""Options and cost of local updates: replicas train alone for several steps, then exchange displacements. No torch.

A displacement is the difference between the anchor, which replicas share, and a replica's own parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from topology.calls import CollectiveCall
from topology.partition import CHUNK_ENTRIES
from topology.ring_bytes import LevelSize
from torchtitan_scape.core.options import FREE
from torchtitan_scape.core.workloads import LocalModel, layer_of
from torchtitan_scape.methods.cost import GradientCost, gathered_bytes, scaled
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.quantized.options import QuantizedOptions

Code = Literal["float32", "int8", "int4", "e2m1", "e3m0"]


@dataclass(frozen=True)
class FragmentSchedule:
    """The steps at which each fragment of the parameters is exchanged. Steps are attempted ones, from 1.

    Attributes:
        inner_steps: Steps of a round, in which every parameter is exchanged once.
        fragments: Parts that are exchanged one after the other.
        delay: Steps from the start of an exchange to the use of its result.
        mix: Share of a replica's own parameter that is kept when a result is used.
    """

    inner_steps: int
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0

    def is_due(self, fragment: int, step: int) -> bool:
        """Return whether the exchange of the fragment starts at this step."""
        return self.last_due(fragment, step) == step

    def last_due(self, fragment: int, step: int) -> int:
        """Return the last step up to `step` at which the fragment was due; 0 or less if there was none."""
        first = round((fragment + 1) * self.inner_steps / self.fragments)
        return step - (step - first) % self.inner_steps

    def fragment_of(self, name: str) -> int:
        """Return the fragment of a parameter: layers are distributed over all but the first, which has the rest."""
        layer = layer_of(name)
        return 0 if self.fragments == 1 or layer is None else 1 + layer % (self.fragments - 1)


@dataclass
class LocalOptions(MethodOptions):
    """Options that all sections of this family have; each section has its own defaults."""

    inner_steps: int = 30
    """Steps that replicas train alone between two exchanges of a parameter"""

    outer_lr: float = 0.7
    """Constant learning rate of the anchor, which replicas share and which follows the mean of their displacements"""

    outer_momentum: float = 0.9
    """Nesterov momentum of the anchor, in [0, 1); 0 for none"""

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
        """Return the options of the gradient method that averages displacements."""
        raise NotImplementedError

    def label(self) -> str:
        code = getattr(self, "code", "float32")
        return f"{self.method_name()} {self.inner_steps:g}" + ("" if code == "float32" else f" {code}")

    def steps_per_round(self) -> int:
        return self.schedule().inner_steps + self.schedule().delay

    def needs_comm_streams(self) -> bool:
        return self.averaging().needs_comm_streams()

    def offloaded(self) -> tuple[str, ...]:
        return ("anchor",) if self.host else ()

    def without_memory_savings(self) -> Self:
        return replace(self, host=False)

    def cost(self) -> "LocalCost":
        return LocalCost(self)


def whole_displacements(code: Code) -> MethodOptions:
    """Return the options that average whole displacements in this encoding; the quantization error is dropped."""
    if code == "float32":
        return DenseOptions()
    return QuantizedOptions(code=code, error_feedback=False)


@dataclass(frozen=True)
class LocalCost(GradientCost):
    """Cost of local updates. An exchange of a fragment counts by its share of the steps."""

    options: LocalOptions

    def collective_calls(
        self, model: LocalModel, levels: Sequence[LevelSize], chunk_entries: int = CHUNK_ENTRIES
    ) -> list[CollectiveCall]:
        schedule, averaging = self.options.schedule(), self.options.averaging().cost()
        calls: list[CollectiveCall] = []
        for number in range(schedule.fragments):
            fragment = model.select({name for name in model.names if schedule.fragment_of(name) == number})
            if fragment.names:  # a model may have fewer layers
                calls += averaging.collective_calls(fragment, levels, chunk_entries)
        return scaled(calls, 1.0 / schedule.inner_steps, hidden=schedule.delay > 0)

    def traffic_per_parameter(self) -> float:
        """Read anchor and parameter and write the displacement 12, fill and empty chunks 16, encode and decode 16; then
        read the mean 4, read and write anchor and momentum 8 each, write the parameter 4. Mean over a round."""
        options = self.options
        coded = 16.0 if isinstance(options.averaging(), QuantizedOptions) else 0.0
        momentum = 8.0 if options.outer_momentum else 0.0
        return (12.0 + 16.0 + coded + 4.0 + 8.0 + momentum + 4.0) / options.inner_steps

    def shared_states(self, model: LocalModel) -> dict[str, float]:
        """Return the bytes of anchor and outer momentum, on the device or on the host."""
        n = 4.0 * model.entries
        return {"anchor": n} | ({"outer momentum": n} if self.options.outer_momentum else {})

    def device_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Displacements exist at an exchange; with a delay their chunks are in flight besides. Fragments are taken as
        equal."""
        schedule = self.options.schedule()
        displacements = 4.0 * model.entries / schedule.fragments
        states = {} if self.options.host else self.shared_states(model)
        return states | {"displacements": (2.0 if schedule.delay else 1.0) * displacements}

    def host_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        return self.shared_states(model) if self.options.host else {}

    def host_link_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """The anchor is read for the displacement; the outer step reads and writes all states on the host. Mean over a
        round."""
        host = self.host_memory(model, replicas)
        return 0.0, (host.get("anchor", 0.0) + 2 * sum(host.values())) / self.options.inner_steps

    def simulated_memory(self, model: LocalModel, replicas: int, optimizer: dict[str, float]) -> dict[str, float]:
        kinds = optimizer | self.device_memory(model, replicas)
        return {kind: replicas * nbytes for kind, nbytes in kinds.items()}


@dataclass(frozen=True)
class SparseLocalCost(LocalCost):
    """Local updates that send the largest entries of the displacements and keep the rest as a residual."""

    def traffic_per_parameter(self) -> float:
        averaging = self.options.averaging().cost()
        assert isinstance(averaging, GradientCost)
        return super().traffic_per_parameter() + averaging.traffic_per_parameter() / self.options.inner_steps

    def device_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        kept = {"residual": 4.0 * model.entries, "messages": replicas * gathered_bytes(self, model, replicas)}
        return super().device_memory(model, replicas) | kept

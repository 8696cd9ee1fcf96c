"""Local updates: replicas train alone for several steps, then exchange displacements.

The base class of this family: Douillard et al., "DiLoCo" (arXiv:2311.08105) and "Streaming DiLoCo" (2501.18512), Sarfi
et al., "SparseLoCo" (2508.15706). A method of the family consists of a schedule, the rates of the outer step, and a
gradient method that averages displacements in the place of gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, stored
from torchtitan_scape.methods.base import GradientMethod, LocalMethod
from torchtitan_scape.methods.interface import MethodContext, State, StepInfo
from torchtitan_scape.methods.local_options import LocalOptions
from torchtitan_scape.methods.registry import implementation_of


@dataclass(frozen=True)
class OuterOptimizer:
    """The outer step: SGD on the mean displacement, with PyTorch's Nesterov momentum."""

    rate: float
    momentum: float = 0.0

    def step(self, anchor: Tensor, momentum: Tensor | None, mean: Tensor) -> None:
        """All FP32 (n,): anchor and momentum, None without one, are changed in place; `mean` is overwritten."""
        if momentum is not None:
            momentum.mul_(self.momentum).add_(mean)
            mean.add_(momentum, alpha=self.momentum)
        anchor.sub_(mean, alpha=self.rate)


@dataclass
class _Fragment:
    """Parameters that are exchanged together, by a codec of their own."""

    number: int
    shards: list[Shard]
    codec: GradientMethod


@dataclass
class _FragmentInFlight:
    """An exchange on its way.

    lands: at which step; None where it was begun before this process, until the next step tells.
    take: waits and gives the mean displacements, FP32 (n,) a shard, which are `means` from then on.
    """

    fragment: _Fragment
    shards: list[Shard]
    lands: int | None
    take: Callable[[], list[Tensor]]
    means: list[Tensor] = field(default_factory=list)

    def arrived(self) -> list[Tensor]:
        if not self.means and self.shards:
            self.means = self.take()
        return self.means


class LocalUpdates(LocalMethod):
    """After the update of a step, for the fragments whose turn it is (theta: this replica's parameters):

    1. D_i = anchor - theta_i; the codec begins the mean D of all D_i;
    2. `delay` steps later D is taken: v = mu v + D, anchor -= rate (D + mu v);
    3. theta_i = mix theta_i + (1 - mix) anchor. The inner optimizer's moments stay.

    At a skipped step nothing begins and nothing lands: what was due waits for its turn in the next round, what was to
    land does so with the next step that is applied; where its fragment's own turn was skipped as well, `delay` steps
    after that at the earliest. The host asks for that, and waits for the device, at those steps alone.

    The gradient method of `options.averaging()` averages the displacements of each fragment. What it keeps as a
    residual of gradients is a residual of displacements here.
    """

    def __init__(self, context: MethodContext, options: LocalOptions) -> None:
        super().__init__(context, options)
        schedule, host = options.schedule(), options.host
        self.schedule, self.outer = schedule, OuterOptimizer(options.outer_lr, options.outer_momentum)
        averaging = options.averaging()
        self._anchors = {s.name: _kept(stored(s.parameter), host) for s in context.shards}
        self._momenta = {name: torch.zeros_like(a) for name, a in self._anchors.items()} if self.outer.momentum else {}
        if host and self._momenta and context.shards[0].device.type == "cuda":
            self._momenta = {name: v.pin_memory() for name, v in self._momenta.items()}
        self._fragments: list[_Fragment] = []
        for number in range(schedule.fragments):
            shards = [s for s in context.shards if schedule.fragment_of(s.name) == number]
            if shards:  # a model may have fewer layers
                part = replace(context, shards=shards, gradient_scale=1.0)
                codec = implementation_of(averaging)(part, averaging)
                assert isinstance(codec, GradientMethod)
                self._fragments.append(_Fragment(number, shards, codec))
        self._flights: list[_FragmentInFlight] = []
        self._whole = False

    def exchange(self, step: StepInfo) -> None:
        whole, self._whole = self._whole, False
        for flight in self._flights:
            if flight.lands is None:
                begun = self.schedule.last_due(flight.fragment.number, step.number - 1)
                flight.lands = begun + self.schedule.delay
        landing = [flight for flight in self._flights if whole or (flight.lands or 0) <= step.number]
        due = [f for f in self._fragments if whole or self.schedule.is_due(f.number, step.number)]
        if not (landing or due):
            return
        if not step.applied.item():
            for flight in landing:  # one that is held beyond its fragment's next turn goes by that, as after a resume
                if self.schedule.is_due(flight.fragment.number, step.number):
                    flight.lands = step.number + self.schedule.delay
            return
        for flight in landing:
            self._land(flight, self.schedule.mix)
        at_once = whole or self.schedule.delay == 0
        flights = [self._begin(fragment, step, at_once) for fragment in due]
        for flight in flights if at_once else ():
            self._land(flight, 0.0 if whole else self.schedule.mix)

    def states(self) -> list[State]:
        found = [State("anchor", self._anchors, per_replica=False, on_migration="model")]
        if self._momenta:
            found.append(State("outer_momentum", self._momenta, per_replica=False, on_migration="copy"))
        in_flight = {
            shard.name: mean.view(shard.local_shape)
            for flight in self._flights
            for shard, mean in zip(flight.shards, flight.arrived(), strict=True)
        }
        return [*found, State("in_flight", in_flight, per_replica=False, on_migration="copy"), *self._codec_states()]

    def allocate(self, kind: str, name: str) -> None:
        if kind != "in_flight":
            return
        for fragment in self._fragments:
            for shard in (shard for shard in fragment.shards if shard.name == name):
                flight = next((f for f in self._flights if f.fragment is fragment), None)
                if flight is None:
                    flight = _FragmentInFlight(fragment, [], None, list)
                    self._flights.append(flight)
                flight.shards.append(shard)
                flight.means.append(torch.zeros(shard.size, dtype=torch.float32, device=shard.device))

    def request_full_exchange(self) -> None:
        """The next step exchanges all parameters at once and uses the means in it; replicas are equal then."""
        self._whole = True
        for fragment in self._fragments:
            fragment.codec.request_full_exchange()

    def density(self) -> float:
        sizes = [sum(shard.size for shard in fragment.shards) for fragment in self._fragments]
        sent = sum(n * f.codec.density() for n, f in zip(sizes, self._fragments, strict=True))
        return sent / max(1, sum(sizes)) / self.schedule.inner_steps

    def _begin(self, fragment: _Fragment, step: StepInfo, at_once: bool) -> _FragmentInFlight:
        moved = []
        for shard in fragment.shards:
            theta = stored(shard.parameter)
            moved.append(torch.sub(self._anchors[shard.name].to(theta.device), theta).view(-1))
        step = step._replace(
            applied=step.applied.clone()
        )  # the container's tensor is of a later step when this is taken
        # At once it goes through the buffers of few chunks.
        take = GradientMethod.start(fragment.codec, moved, step) if at_once else fragment.codec.start(moved, step)
        flight = _FragmentInFlight(fragment, fragment.shards, step.number + self.schedule.delay, take)
        self._flights.append(flight)
        return flight

    def _land(self, flight: _FragmentInFlight, mix: float) -> None:
        for shard, mean in zip(flight.shards, flight.arrived(), strict=True):
            theta, anchor, momentum = stored(shard.parameter), self._anchors[shard.name], self._momenta.get(shard.name)
            # Copies where they lie in host memory.
            on_device = anchor.to(theta.device)
            v = None if momentum is None else momentum.to(theta.device)
            self.outer.step(on_device.view(-1), None if v is None else v.view(-1), mean.view(-1))
            if on_device is not anchor:
                anchor.copy_(on_device)
            if momentum is not None and v is not None and v is not momentum:
                momentum.copy_(v)
            if mix:
                theta.mul_(mix).add_(on_device, alpha=1.0 - mix)
            else:
                theta.copy_(on_device)
        self._flights.remove(flight)

    def _codec_states(self) -> list[State]:
        merged: dict[str, State] = {}
        for fragment in self._fragments:
            for state in fragment.codec.states():
                tensors = state.tensors
                if not state.by_parameter:
                    tensors = {f"{fragment.number}.{name}": values for name, values in tensors.items()}
                on_migration = "displacement" if state.on_migration == "gradient" else state.on_migration
                before = merged[state.kind].tensors if state.kind in merged else {}
                merged[state.kind] = State(
                    state.kind, before | tensors, state.per_replica, on_migration, state.by_parameter
                )
        return list(merged.values())


def _kept(values: Tensor, host: bool) -> Tensor:
    """A copy of FP32 values, in host memory if asked; pinned where that is another one than the device's."""
    copy = values.detach().to("cpu" if host else values.device, torch.float32, copy=True)
    return copy.pin_memory() if host and values.is_cuda else copy

"""Local updates: several local steps, then an exchange of displacements.

DiLoCo (Douillard et al., arXiv:2311.08105; the defaults are those of "Scaling Laws for DiLoCo", arXiv:2503.09799),
Streaming DiLoCo (Douillard et al., arXiv:2501.18512) and SparseLoCo (Sarfi et al., arXiv:2508.15706; a run with 72 B
parameters is described in arXiv:2603.08163) differ in their options alone: a schedule, the rates of the outer step, and
the options of a gradient method that averages displacements instead of gradients. CO2, a
subclass, has another outer step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, stored
from torchtitan_scape.core.tensors import flat
from torchtitan_scape.kernels.common.offload import host_tensors
from torchtitan_scape.methods.base import GradientMethod, LocalMethod
from torchtitan_scape.methods.interface import MethodContext, State, StepInfo
from torchtitan_scape.methods.local_options import LocalOptions
from torchtitan_scape.methods.registry import implementation_of


@dataclass
class _Fragment:
    """Parameters that are exchanged together.

    Attributes:
        averaging: The method that averages their displacements.
    """

    number: int
    shards: list[Shard]
    averaging: GradientMethod


@dataclass
class _FragmentInFlight:
    """The exchange of a fragment between its start and the use of its result.

    Attributes:
        due: The step that applies the result; None until the next step if the exchange comes from a checkpoint.
        finish: Waits and returns the mean displacements, FP32 (n,) per shard.
        means: The result of `finish`, once it was called.
    """

    fragment: _Fragment
    shards: list[Shard]
    due: int | None
    finish: Callable[[], list[Tensor]]
    means: list[Tensor] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        if not self.means and self.shards:
            self.means, self.finish = self.finish(), list  # releases the buffers of the exchange
        return self.means


class LocalUpdates(LocalMethod):
    """Exchange of the displacements of the fragments that are due in a step (theta_i: the parameters of replica i).

    After the inner optimizer's update:

    1. D_i = anchor - theta_i; start averaging all D_i to D;
    2. `delay` steps later: v = mu v + D, anchor -= rate (D + mu v), which is `torch.optim.SGD` with Nesterov momentum;
    3. theta_i = mix theta_i + (1 - mix) anchor. The inner optimizer's moments do not change.

    Results that are due are used first. With `restart` the exchange starts first, and theta_i = anchor follows it.

    A skipped step starts no exchange and applies no result. A fragment that was due is exchanged in the next round. A
    result that was due is applied by the next step that is not skipped; if the next exchange of its fragment was
    skipped as well, at the earliest `delay` steps after that. Only in such steps does the host wait for the device.

    The method of `options.averaging()` averages the displacements. Its residual is a residual of displacements here.

    Attributes:
        in_flight_kind: kind of the state with the results of running exchanges.
    """

    def __init__(self, context: MethodContext, options: LocalOptions) -> None:
        super().__init__(context, options)
        self.schedule, averaging = options.schedule(), options.averaging()
        self.in_flight_kind = "displacement_in_flight" if self.schedule.restart else "in_flight"
        self._anchors = self._zeros(options.host)
        for shard in context.shards:
            self._anchors[shard.name].copy_(stored(shard.parameter).detach())
        self._momenta = self._zeros(options.host) if options.stores_momentum() else {}
        self._fragments: list[_Fragment] = []
        for number in range(self.schedule.fragments):
            shards = [s for s in context.shards if self.schedule.fragment_of(s.name) == number]
            if shards:  # a model may have fewer layers
                averaged = implementation_of(averaging)(replace(context, shards=shards, gradient_scale=1.0), averaging)
                assert isinstance(averaged, GradientMethod)
                self._fragments.append(_Fragment(number, shards, averaged))
        self._in_flight: list[_FragmentInFlight] = []

    def _zeros(self, host: bool) -> dict[str, Tensor]:
        """Return FP32 zeros of every parameter's shape, in host memory if `host`."""
        values = {shard.name: stored(shard.parameter).detach() for shard in self.context.shards}
        if not host:
            return {name: torch.zeros_like(value, dtype=torch.float32) for name, value in values.items()}
        device = self.context.shards[0].device
        return dict(zip(values, host_tensors([value.shape for value in values.values()], device, self), strict=True))

    def exchange(self, info: StepInfo) -> None:
        full = self.take_full_exchange_request()
        for exchange in self._in_flight:
            if exchange.due is None:
                started = self.schedule.last_due(exchange.fragment.number, info.number - 1)
                exchange.due = started + self.schedule.delay
        results = [exchange for exchange in self._in_flight if full or (exchange.due or 0) <= info.number]
        fragments = [f for f in self._fragments if full or self.schedule.is_due(f.number, info.number)]
        if not (results or fragments):
            return
        if not info.applied.item():
            for exchange in results:  # as after a resume: count `delay` from the fragment's last scheduled exchange
                if self.schedule.is_due(exchange.fragment.number, info.number):
                    exchange.due = info.number + self.schedule.delay
            return
        at_once = full or self.schedule.delay == 0
        if self.schedule.restart:
            for exchange in results:
                exchange.wait()
            started_now = [self._start(fragment, info, at_once) for fragment in fragments]
        for exchange in results:
            self._apply(exchange, self.schedule.mix)
        if not self.schedule.restart:
            started_now = [self._start(fragment, info, at_once) for fragment in fragments]
        for exchange in started_now if at_once else ():
            self._apply(exchange, 0.0 if full else self.schedule.mix)

    def _start(self, fragment: _Fragment, info: StepInfo, at_once: bool) -> _FragmentInFlight:
        """Start averaging the displacements of a fragment."""
        thetas = [stored(shard.parameter) for shard in fragment.shards]
        anchors = [self._anchors[shard.name] for shard in fragment.shards]
        displacements: list[Tensor] = []
        # States in host memory are copied one after the other.
        parts = [range(len(thetas))] if anchors[0].device == thetas[0].device else [[i] for i in range(len(thetas))]
        for part in parts:
            own, targets = [anchors[i].to(thetas[i].device) for i in part], [thetas[i] for i in part]
            displacements += flat(torch._foreach_sub(own, targets))
            if self.schedule.restart:
                torch._foreach_copy_(targets, own)
        averaging, factor = fragment.averaging, self.options.error_factor()
        if factor != 1.0:
            torch._foreach_mul_([t for state in averaging.states() for t in state.tensors.values()], factor)
        # Later steps overwrite the optimizer's flag before the exchange finishes.
        info = info._replace(applied=info.applied.clone())
        # Without a delay, the default `start` needs buffers for two chunks only, not for all.
        start = partial(GradientMethod.start, averaging) if at_once else averaging.start
        finish = start(displacements, info)
        exchange = _FragmentInFlight(fragment, fragment.shards, info.number + self.schedule.delay, finish)
        self._in_flight.append(exchange)
        return exchange

    def _apply(self, exchange: _FragmentInFlight, mix: float) -> None:
        """Run the outer step with the result of an exchange, and update this replica's parameters."""
        shards, means = exchange.shards, exchange.wait()
        self.scale_means({shard.name: mean for shard, mean in zip(shards, means, strict=True)})
        for shard, mean in zip(shards, means, strict=True):
            name = shard.name
            self._step(stored(shard.parameter), self._anchors[name], self._momenta.get(name), mean, mix)
        self._in_flight.remove(exchange)

    def _step(self, theta: Tensor, anchor: Tensor, momentum: Tensor | None, mean: Tensor, mix: float) -> None:
        """Run the outer step of one parameter. Anchor and momentum are copied if they are in host memory."""
        on_device = anchor.to(theta.device)
        v = None if momentum is None else momentum.to(theta.device)
        self.move_anchor(on_device.view(-1), None if v is None else v.view(-1), mean.view(-1))
        if on_device is not anchor:
            anchor.copy_(on_device)
        if momentum is not None and v is not None and v is not momentum:
            momentum.copy_(v)
        if mix:
            theta.mul_(mix).add_(on_device, alpha=1.0 - mix)
        else:
            theta.copy_(on_device)

    def scale_means(self, means: dict[str, Tensor]) -> None:
        """Scale mean displacements, FP32 (n,) by name, in place before the outer step uses them. Collective."""

    def move_anchor(self, anchor: Tensor, momentum: Tensor | None, mean: Tensor) -> None:
        """Move an anchor along the mean displacement, FP32 (n,), in place; anything but the anchor is overwritten.

        momentum: FP32 (n,), or None without momentum.
        """
        if momentum is not None:
            momentum.mul_(self.options.outer_momentum).add_(mean)
            mean.add_(momentum, alpha=self.options.outer_momentum)
        anchor.sub_(mean, alpha=self.options.outer_lr)

    def states(self) -> list[State]:
        shared = [State("anchor", self._anchors, per_replica=False, on_migration="model")]
        if self._momenta:
            shared.append(State("outer_momentum", self._momenta, per_replica=False, on_migration="copy"))
        in_flight = {
            shard.name: mean.view(shard.local_shape)
            for exchange in self._in_flight
            for shard, mean in zip(exchange.shards, exchange.wait(), strict=True)
        }
        # Without a restart replicas keep their own steps until a result is used: a run that drops it loses no step.
        migration: Literal["copy", "displacement"] = "displacement" if self.schedule.restart else "copy"
        return [
            *shared,
            State(self.in_flight_kind, in_flight, per_replica=False, on_migration=migration),
            *self._averaging_states(),
        ]

    def prepare_to_load(self) -> None:
        super().prepare_to_load()
        for exchange in self._in_flight:
            exchange.wait()
        self._in_flight.clear()
        for values in (*self._momenta.values(), *(t for s in self._averaging_states() for t in s.tensors.values())):
            values.zero_()
        for fragment in self._fragments:
            fragment.averaging.prepare_to_load()

    def allocate(self, kind: str, name: str) -> None:
        if kind != self.in_flight_kind:
            return
        for fragment in self._fragments:
            for shard in (shard for shard in fragment.shards if shard.name == name):
                exchange = next((f for f in self._in_flight if f.fragment is fragment), None)
                if exchange is None:
                    exchange = _FragmentInFlight(fragment, [], None, list)
                    self._in_flight.append(exchange)
                exchange.shards.append(shard)
                exchange.means.append(torch.zeros(shard.size, dtype=torch.float32, device=shard.device))

    def request_full_exchange(self) -> None:
        """Make the next step exchange all parameters and apply the result at once, so that replicas are equal."""
        super().request_full_exchange()
        for fragment in self._fragments:
            fragment.averaging.request_full_exchange()

    def density(self) -> float:
        sizes = [sum(shard.size for shard in fragment.shards) for fragment in self._fragments]
        sent = sum(n * f.averaging.density() for n, f in zip(sizes, self._fragments, strict=True))
        return sent / max(1, sum(sizes)) / self.schedule.inner_steps

    def _averaging_states(self) -> list[State]:
        merged: dict[str, State] = {}
        for fragment in self._fragments:
            for state in fragment.averaging.states():
                tensors = state.tensors
                if not state.by_parameter:
                    tensors = {f"{fragment.number}.{name}": values for name, values in tensors.items()}
                on_migration = "displacement" if state.on_migration == "gradient" else state.on_migration
                before = merged[state.kind].tensors if state.kind in merged else {}
                merged[state.kind] = State(
                    state.kind, before | tensors, state.per_replica, on_migration, state.by_parameter
                )
        return list(merged.values())


def staleness_gap(last_step: Tensor, displacement: Tensor) -> Tensor:
    """Return 1 + last_step / displacement, FP32 (), at least 1.

    Args:
        last_step: Norm of the last outer step, FP32 ().
        displacement: Norm of the mean displacement, FP32 (); it may be 0.
    """
    return 1.0 + last_step / displacement.clamp(min=torch.finfo(torch.float32).tiny)


def norm_of(tensor: Tensor) -> Tensor:
    """Return the norm, FP64 ()."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


class Co2(LocalUpdates):
    """CO2: local steps, with an average of the replicas that overlaps with the whole next round.

    Sun et al., "CO2: Efficient Distributed Training with Full Communication-Computation Overlap", ICLR 2024,
    arXiv:2401.16265, Algorithm 1. Names of the paper: x_{t,k} are a replica's parameters after k local steps of round
    t, tau is `inner_steps`, alpha `outer_lr`, beta `outer_momentum`, phi `momentum_clip`. The anchor is x_{t,0}. At the
    end of round t:

    1. D = x_{t-1,0} - the mean of x_{t-1,tau}, from the exchange that round t overlapped with.
    2. Start averaging x_{t,0} - x_{t,tau}.
    3. D = D / gap, with gap = 1 + |alpha m| / |D|.
    4. m = clip(beta m + D); x_{t+1,0} = x_{t,0} - alpha m, on all replicas.

    |alpha m| before step 4 is |x_{t,0} - x_{t-1,0}|. A result in flight contains a round of steps that no replica has
    in its parameters any more, so a run that cannot continue it applies it to the weights.

    There is no stale result at the end of the first round: the momentum stays zero, and replicas return to x_{0,0}.
    docs/reference/methods/co2.md has the deviations from the published code.
    """

    def move_anchor(self, anchor: Tensor, momentum: Tensor | None, mean: Tensor) -> None:
        moved = mean if momentum is None else momentum.mul_(self.options.outer_momentum).add_(mean)
        if clip := self.options.momentum_clip:
            moved.clamp_(-clip, clip)
        anchor.sub_(moved, alpha=self.options.outer_lr)

    def scale_means(self, means: dict[str, Tensor]) -> None:
        if not self.options.gap_penalty:
            return
        # The order of the shards is that of the run, whatever the order in a checkpoint.
        names = [shard.name for shard in self.context.shards]
        stale = [means[name] for name in names]
        # One by one: with `host`, each momentum is copied to the device.
        last = [norm_of(self._momenta[name].to(mean.device)) for name, mean in zip(names, stale, strict=True)]
        last_step = self.norm_over_model(last) * self.options.outer_lr
        gap = staleness_gap(last_step, self.norm_over_model([norm_of(mean) for mean in stale]))
        torch._foreach_div_(stale, gap)

"""Gradients in few bits to the owner of a parameter, and its update in few bits back to all replicas.

Each replica updates a part of the parameters, as in ZeRO (Rajbhandari et al., arXiv:1910.02054), and sends the change
of the weights in a block code, as SDP4Bit does (Jia et al., arXiv:2410.15526), with error feedback in both directions.
With Muon this is EF21-Muon (Gruntkowska et al., arXiv:2510.00643) with a server for every matrix, apart from the error
feedback of the gradients, which is that of 1-bit SGD (Seide et al., 2014).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.parameters import Shard, check_contiguous, local, stored
from torchtitan_scape.core.tensors import add_to_each_, flat, masked_copy_
from torchtitan_scape.kernels.backends import block_code, choose_backend
from torchtitan_scape.kernels.codec.codes import BlockCode
from torchtitan_scape.methods.interface import ErrorFeedback, Method, MethodContext, State, StepInfo
from torchtitan_scape.methods.quantized_update.bases import SharedBases
from torchtitan_scape.methods.quantized_update.columns import columns_of
from torchtitan_scape.methods.quantized_update.layout import OwnPart, divide
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateCost, QuantizedUpdateOptions
from torchtitan_scape.methods.quantized_update.owners import Owners
from torchtitan_scape.methods.update import clip_factor, one_for_several_steps
from torchtitan_scape.optimizers.adams import AdamS
from torchtitan_scape.optimizers.algorithms import has_step_of
from torchtitan_scape.optimizers.initial_state import create_state
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.optimizers.signsgd import SignSGD
from torchtitan_scape.topology.calls import CollectiveCall
from torchtitan_scape.topology.chunks import double_buffered

# Optimizers that may update a part of a tensor.
ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, AdamS, SignSGD)


class QuantizedUpdate(Method):
    """One step (W: the weights that all replicas have, V = W - u: those of an entry's owner, u: its unsent update).

    1. Each replica encodes gradient plus residual for the owners, and keeps the error as its residual.
    2. An owner computes the mean, clips it, and takes the optimizer's step from W - u to new weights V.
    3. It sends V - W, encoded, to all replicas. They add the decoded change to W; u becomes W - V.

    The errors of step 3 move the weights by less than a step. In the mean of the gradients, which `Quantized` sends
    instead, they would cost more: Muon magnifies the small parts of the gradient.

    A replica owns whole matrices of Muon, so that none repeats the work of another, and blocks of all other parameters.
    Moments and unsent updates are current on the owner only; see `gather_state`.

    With `interval` = K above 1 the parameters are divided into K groups, and a step exchanges one of them. Gradients of
    the others are added to their residuals. The optimizer's step of a parameter has the mean over the last K steps, and
    stands for all of them.
    """

    def __init__(self, context: MethodContext, options: QuantizedUpdateOptions) -> None:
        super().__init__(context, options)
        shards, replicas = context.shards, self.collectives.replicas
        check_contiguous(shards, options.method_name())
        for shard in shards:
            if (dtype := stored(shard.parameter).dtype) != torch.float32:
                raise ValueError(
                    f"method 'quantized_update' needs weights in FP32, and {shard.name!r} is {dtype}: changes below "
                    "its rounding would be lost; keep the parameters in FP32 and compute in BF16 by mixed precision"
                )
        if options.interval > 1 and not has_step_of(context.optimizer, Muon, *ELEMENTWISE):
            kind, known = type(context.optimizer), ", ".join(one.__name__ for one in ELEMENTWISE)
            raise ValueError(
                f"[sync.quantized_update] interval = {options.interval} with {kind.__module__}.{kind.__name__}: a step "
                f"for several is known for torchtitan_scape.Muon, {known}; set interval = 1"
            )
        backend = choose_backend(context.kernels, shards[0].device)
        self._code = block_code(backend, options.code, options.block)
        self._update_code = block_code(backend, options.update_code, options.block)
        shorter = min(self._code, self._update_code, key=lambda code: code.block_bytes)
        sizes = [shard.size for shard in shards]
        self._groups = divide(
            sizes,
            [shard.entries if _is_whole(shard, context.optimizer) else 0 for shard in shards],
            replicas,
            block=options.block,
            limit=self.collectives.chunk_limit(sum(sizes), shorter),
            equal_rows=len(self.collectives.levels) > 1,
            groups=options.interval,
            entries=[shard.entries for shard in shards],
        )
        self._own = [group.part_of(self.collectives.replica) for group in self._groups]
        self._owners = Owners(shards, self._groups, self.collectives, context.grad_norm.device)
        self._residual, self._unsent = ErrorFeedback.of(shards), ErrorFeedback.of(shards)
        states = [list(each.tensors.values()) for each in (self._residual, self._unsent)]
        self._columns = columns_of(backend, shards, self.collectives, options.block, *states)
        # By group: the squared norm of the gradient of its last exchange, and the steps that were applied since then.
        # The host reads only later whether a step was applied. Until then it keeps the numbers of the exchanged groups.
        self._squares = torch.zeros(options.interval, dtype=torch.float32, device=shards[0].device)
        self._accumulated = torch.zeros(options.interval, dtype=torch.int64, device="cpu")
        self._steps: list[int] | None = [0] * options.interval  # the same numbers; None before they are read
        self._last_exchanged: list[int] | None = None
        self._bases: SharedBases | None = None
        if options.whiten_every and replicas > 1 and isinstance(context.optimizer, Muon):
            updates = context.optimizer.updates
            whole = [(shard.name, self._owners.of_whole(i)) for i, shard in enumerate(shards) if updates(shard)]
            owners = {name: owner for name, owner in whole if owner is not None}
            self._bases = SharedBases(shards, owners, self.collectives)
        create_state(context.optimizer)  # in a step, replicas would create that of different parameters

    # ------------------------------------------------------------------------------------------ the step

    def finish_previous_step(self, applied: bool) -> None:
        if applied and self._last_exchanged is not None:
            self._steps = [0 if k in self._last_exchanged else self._steps_of(k) for k in range(self.options.interval)]
            self._accumulated.copy_(torch.tensor(self._steps, dtype=torch.int64, device="cpu"))
        self._last_exchanged = None

    def step(self, gradients: list[Tensor], info: StepInfo) -> None:
        context, phase, interval = self.context, self.context.timer.phase, self.options.interval
        full = self.take_full_exchange_request()
        exchanged = range(interval) if full else [info.number % interval]
        encoded = not full and self.collectives.replicas > 1
        codes = (self._code, self._update_code) if encoded else (None, None)
        with self._columns.bound(gradients):
            with phase("exchange"):
                self._reduce(gradients, exchanged, codes[0], info)
            self._observe_all(gradients, exchanged, info)
            with phase("clip"):
                norm = self._norm(gradients, exchanged, info.applied)
                context.grad_norm.copy_(torch.where(info.applied, norm, torch.nan))
                factor = None if context.max_norm is None else clip_factor(context.grad_norm, context.max_norm)
                if factor is not None:
                    context.clip_factor.copy_(factor)
            applied = info.applied & norm.isfinite()
            for number in exchanged:
                self._update(gradients, number, codes[1], applied, factor)
        self._last_exchanged = list(exchanged)

    def _reduce(
        self, gradients: Sequence[Tensor], exchanged: Sequence[int], code: BlockCode | None, info: StepInfo
    ) -> None:
        """Replace gradients by their means over replicas and steps, where exchanged and owned. Collective.

        Those of other groups are added to the residuals. The parts of other owners become zero in owned tensors, and
        undefined elsewhere.
        """
        columns, factor, bases = self._columns, self.context.gradient_scale, self._bases
        if bases is not None:
            if factor != 1.0:
                torch._foreach_mul_(list(gradients), factor)
            if self.options.changes_bases(bases.number_of(info.number)):
                bases.change(flat(self._residual.tensors.values()), info.applied)
            gradients, factor = flat(gradients), 1.0
            bases.whitening.encode(gradients)
        for number, group in enumerate(self._groups):
            if number not in exchanged:
                columns.add_to_residuals(group.tensors, factor, info.applied)
        double_buffered(
            columns.to_owners(column, code, factor, self._steps_of(number), info.applied)
            for number in exchanged
            for column in self._groups[number].columns
        )
        for number in exchanged:
            if bases is not None:
                bases.decode_own(gradients, self._groups[number].tensors, info.applied)
            for s in self._own[number].others:
                gradients[s.tensor].view(-1)[s.first : s.first + s.length].zero_()

    def _norm(self, gradients: Sequence[Tensor], exchanged: Sequence[int], applied: Tensor) -> Tensor:
        """Return the norm of the synchronized gradient over the whole model, FP32 (). Collective.

        Other groups count with the gradient of their last exchange; with zero before their first one.
        """
        sound = torch.ones_like(applied)
        for number in exchanged:
            own = [gradients[i] for i in self._own[number].tensors if self.context.shards[i].counted]
            squares = torch.zeros((), dtype=torch.float32, device=self.context.grad_norm.device)
            if own:
                squares += self.norms(own).square().sum().float()
            squares = self.collectives.sum_over_owners(squares)
            sound = sound & squares.isfinite()
            masked_copy_(self._squares[number], squares, applied & sound)
        return torch.where(sound, self._squares.sum().sqrt(), torch.inf)

    def _update(
        self,
        gradients: Sequence[Tensor],
        number: int,
        code: BlockCode | None,
        applied: Tensor,
        factor: Tensor | None,
    ) -> None:
        """Update the parameters of a group with the gradients times a factor, FP32 (). Collective."""
        group, own, columns, steps = self._groups[number], self._own[number], self._columns, self._steps_of(number)
        shards = self.context.shards
        with self.context.timer.phase("update"):
            columns.begin_update(own, applied)
            with self._others_kept(own, steps), one_for_several_steps(self.context.optimizer, steps):
                means = [gradients[i] for i in own.tensors]
                self.optimizer_step([shards[i] for i in own.tensors], means, applied, factor)
            messages = columns.end_update(group, own, code, applied)
        with self.context.timer.phase("exchange"):
            sent = zip(group.columns, messages, strict=True)
            double_buffered(columns.to_replicas(column, message, code) for column, message in sent)
        if self.collectives.is_writer:
            counters = self._counters(group.tensors)
            for device in {counter.device for counter in counters}:
                counted = [counter for counter in counters if counter.device == device]
                add_to_each_(counted, applied.to(device, torch.float64) * steps)

    @contextmanager
    def _others_kept(self, own: OwnPart, steps: int) -> Iterator[None]:
        """Hide the gradients of shards that this replica does not update from the optimizer.

        Its counters of steps are restored at the end. Meanwhile they are divided by `steps`, so that bias corrections
        with rates to that power are right. Simulated replicas share the optimizer: of the entries that others own, the
        state is restored as well.
        """
        parameters, simulated = [shard.parameter for shard in self.context.shards], self.collectives.is_simulated
        kept = [parameter.grad for parameter in parameters]
        for i in set(range(len(parameters))).difference(own.tensors):
            parameters[i].grad = None
        counters = self._counters(own.tensors)
        states = [
            state.view(-1)[s.first : s.first + s.length]
            for s in (own.others if simulated else ())
            for kind, state in self._tensors_of_state(s.tensor).items()
            if kind != "step"
        ]
        restored = counters + states
        before = torch._foreach_mul(restored, 1.0) if restored else ()
        if counters and steps > 1:
            torch._foreach_div_(counters, steps)
        try:
            yield
        finally:
            if restored:
                torch._foreach_copy_(restored, before)
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient

    def _steps_of(self, number: int) -> int:
        """Return the number of steps whose gradients an exchange of a group contains now."""
        if self._steps is None:
            self._steps = self._accumulated.tolist()
        return self._steps[number] + 1

    def _counters(self, numbers: Sequence[int]) -> list[Tensor]:
        """Return the optimizer's counters of steps of some shards."""
        states = (self.context.optimizer.state.get(self.context.shards[i].parameter, {}) for i in numbers)
        return [local(state["step"]) for state in states if isinstance(state.get("step"), Tensor)]

    def _tensors_of_state(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of the optimizer's state of a shard, local ones, by kind."""
        state = self.context.optimizer.state.get(self.context.shards[number].parameter, {})
        return {kind: local(value) for kind, value in sorted(state.items()) if isinstance(value, Tensor)}

    # ---------------------------------------------------------------------------------------------- state

    def prepare_to_load(self) -> None:
        super().prepare_to_load()
        for errors in (self._residual, self._unsent):
            errors.clear(torch.tensor(True, dtype=torch.bool, device="cpu"))
        self._squares.zero_()
        self._accumulated.zero_()
        self._steps = self._last_exchanged = None
        if self._bases is not None:
            self._bases.reset()

    def gather_state(self) -> None:
        for i, shard in enumerate(self.context.shards):
            if self._owners.is_saved_by_owner(i):
                continue
            self._owners.broadcast(i, self._unsent.tensors[shard.name])
            for kind, tensor in self._tensors_of_state(i).items():
                if kind != "step":
                    self._owners.broadcast(i, tensor)

    def saves_optimizer_state(self, name: str) -> bool:
        return name in self._owners.saved

    def states(self) -> list[State]:
        migration: Literal["gradient", "pending"] = "gradient" if self._bases is None else "pending"
        states = [
            State("residual", self._residual.tensors, per_replica=True, on_migration=migration),
            State("unsent_update", self._unsent.tensors, per_replica=False, on_migration="displacement"),
        ]
        name = self.context.shards[0].name
        if self.options.interval > 1:
            of_groups = {"squares": self._squares, "accumulated_steps": self._accumulated}
            states += [State(kind, {name: t}, False, "rebuild", by_parameter=False) for kind, t in of_groups.items()]
        return states if self._bases is None else [*states, *self._bases.states(name)]

    def declared_states(self) -> list[State]:
        # The owner of a matrix alone has all tensors of its basis.
        return [self._bases.declared() if self._bases and s.kind == "basis" else s for s in self.states()]

    def checkpoint_states(self, residual: str) -> list[State]:
        states = {state.kind: state for state in self.states()}
        if residual == "drop" and (counts := states.get("accumulated_steps")):  # the gradients are not saved either
            zeros = {name: torch.zeros_like(tensor) for name, tensor in counts.tensors.items()}
            states[counts.kind] = replace(counts, tensors=zeros)
        unsent = states["unsent_update"]
        saved = {name: values for name, values in unsent.tensors.items() if name in self._owners.saved}
        states[unsent.kind] = replace(unsent, tensors=saved)
        if self._bases is not None:
            states["basis"] = self._bases.whitening.state(self._owners.saved)
        return list(states.values())

    def replicated_tensors(self) -> list[ReplicatedTensors]:
        found = []
        for shard in self.context.shards:
            basis = [] if self._bases is None else self._bases.replicated(shard.name)
            found.append(ReplicatedTensors(shard.name, [(None, stored(shard.parameter)), *basis]))
        return found

    # -------------------------------------------------------------------------------------------- reports

    def collective_calls(self) -> list[CollectiveCall]:
        if self.collectives.replicas == 1:
            return []
        cost: QuantizedUpdateCost = self.options.cost()
        return cost.calls_of(self._groups, self.local_model(), self.collectives.replicas, self._bases is not None)

    def pending_gradient(self, state: State, name: str) -> Tensor:
        errors = super().pending_gradient(state, name)
        return errors if self._bases is None else self._bases.decoded(name, errors)

    def moment_and_residual(self, shard: Shard) -> tuple[Tensor | None, Tensor | None]:
        number = self.context.shards.index(shard)
        if (moment := self._tensors_of_state(number).get("exp_avg")) is not None:
            self._owners.broadcast(number, moment)
        return super().moment_and_residual(shard)

    def density(self) -> float:
        return 1.0 / self.options.interval

    def _observe_all(self, gradients: Sequence[Tensor], exchanged: Sequence[int], info: StepInfo) -> None:
        """Pass the synchronized gradients to the observer. Collective in a step that is observed."""
        if self.is_observed:
            seen = [torch.full_like(gradient, torch.nan) for gradient in gradients]
            for i in (i for k in exchanged for i in self._groups[k].tensors):
                seen[i].copy_(gradients[i])
                self._owners.broadcast(i, seen[i])
            self._observe(seen, info)


def _is_whole(shard: Shard, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether one replica must update the whole parameter."""
    return optimizer.updates(shard) if isinstance(optimizer, Muon) else not has_step_of(optimizer, *ELEMENTWISE)

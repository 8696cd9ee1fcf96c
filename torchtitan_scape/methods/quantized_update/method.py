"""Gradients in few bits to the owner of a parameter, and its update in few bits back to all replicas.

Each replica updates a part of the parameters, as in ZeRO (Rajbhandari et al., arXiv:1910.02054), and sends the change
of the weights in a block code, as SDP4Bit does (Jia et al., arXiv:2410.15526), with error feedback in both directions.
With Muon this is EF21-Muon (Gruntkowska et al., arXiv:2510.00643) with a server for every matrix, apart from the error
feedback of the gradients, which is that of 1-bit SGD (Seide et al., 2014).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.parameters import Shard, check_contiguous, local, store_gradient, stored
from torchtitan_scape.core.tensors import add_to_each_, flat, masked_copy_
from torchtitan_scape.kernels.backends import block_code, choose_backend, exchange_passes
from torchtitan_scape.methods.interface import ErrorFeedback, Method, MethodContext, State, StepInfo
from torchtitan_scape.methods.quantized_update.bases import SharedBases
from torchtitan_scape.methods.quantized_update.columns import ColumnMessages, add_rows, decoded_rows, rows_of
from torchtitan_scape.methods.quantized_update.layout import Column, divide
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateCost, QuantizedUpdateOptions
from torchtitan_scape.methods.quantized_update.owners import Owners
from torchtitan_scape.methods.update import clip_factor, one_for_several_steps
from torchtitan_scape.optimizers.adams import AdamS
from torchtitan_scape.optimizers.algorithms import has_step_of
from torchtitan_scape.optimizers.initial_state import create_state
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.optimizers.signsgd import SignSGD
from torchtitan_scape.topology.calls import CollectiveCall
from torchtitan_scape.topology.chunks import Exchange, double_buffered
from torchtitan_scape.topology.codecs import Codec
from torchtitan_scape.topology.partition import Slice

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
        passes = exchange_passes(backend, (torch.float32,)) if len(self.collectives.levels) == 1 else None
        self._to_owners = ColumnMessages(passes, self._code) if passes else None
        self._to_replicas = ColumnMessages(passes, self._update_code) if passes else None
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
        self._owners = Owners(shards, self._groups, self.collectives, context.grad_norm.device)
        self._residual, self._unsent = ErrorFeedback.of(shards), ErrorFeedback.of(shards)
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
        context, phase, gradients = self.context, self.context.timer.phase, flat(gradients)
        full = self.take_full_exchange_request()
        exchanged = list(range(self.options.interval)) if full else [info.number % self.options.interval]
        encoded = not full and self.collectives.replicas > 1
        with phase("exchange"):
            self._reduce(gradients, exchanged, self._code if encoded else None, info)
        self._observe_all(gradients, exchanged, info)
        with phase("clip"):
            own = [gradients[s.tensor][s.first : s.first + s.length] for k in exchanged for s in self._own_of(k)]
            norm = self._norm(gradients, exchanged, info.applied)
            context.grad_norm.copy_(torch.where(info.applied, norm, torch.nan))
            if context.max_norm is not None:
                context.clip_factor.copy_(clip_factor(context.grad_norm, context.max_norm))
                self.multiply_gradients(own, context.clip_factor)
        code, applied = self._update_code if encoded else None, info.applied & norm.isfinite()
        for number in exchanged:
            self._update(gradients, number, code, applied)
        self._last_exchanged = exchanged

    def _update(self, gradients: Sequence[Tensor], number: int, code: Codec | None, applied: Tensor) -> None:
        """Update the parameters of a group. Collective."""
        with self.context.timer.phase("update"):
            changes = self._update_own(gradients, number, applied)
        with self.context.timer.phase("exchange"):
            double_buffered(self._send(column, changes, code, applied) for column in self._groups[number].columns)
        if self.collectives.is_writer:
            self._count_steps(number, applied)

    def _steps_of(self, number: int) -> int:
        """Return the number of steps whose gradients an exchange of a group contains now."""
        if self._steps is None:
            self._steps = self._accumulated.tolist()
        return self._steps[number] + 1

    def _own_of(self, number: int) -> Sequence[Slice]:
        """Return the slices of a group that this replica owns."""
        return self._groups[number].rows[self.collectives.replica]

    def _reduce(
        self, gradients: Sequence[Tensor], exchanged: Sequence[int], code: Codec | None, info: StepInfo
    ) -> None:
        """Replace gradients by their means over replicas and steps, where exchanged and owned. Collective.

        Those of other groups are added to the residuals. The parts of other owners become undefined.
        """
        residuals = [self._residual.tensors[shard.name].view(-1) for shard in self.context.shards]
        in_place, factor = code is not None and self._to_owners is not None, self.context.gradient_scale
        # Kernels scale the values that they encode, unless these were transformed to a basis before.
        scales = in_place and self._bases is None
        encoded = {i for k in exchanged for i in self._groups[k].tensors} if scales else set()
        if factor != 1.0 and (others := [g for i, g in enumerate(gradients) if i not in encoded]):
            torch._foreach_mul_(others, factor)
        if self._bases is not None:
            if self.options.changes_bases(self._bases.number_of(info.number)):
                self._bases.change(residuals, info.applied)
            self._bases.whitening.encode(gradients)
        skipped = ~info.applied
        for number, group in enumerate(self._groups):
            if number not in exchanged:
                for i in group.tensors:
                    residuals[i] += gradients[i].masked_fill_(skipped, 0.0)
            elif group.tensors and not in_place:
                torch._foreach_add_([gradients[i] for i in group.tensors], [residuals[i] for i in group.tensors])
        encode = partial(self._encode_to_owners, factor=factor if scales else 1.0)
        send = encode if in_place else self._send_to_owners
        send = partial(send, values=gradients, residuals=residuals, code=code, applied=info.applied)
        double_buffered(send(column) for k in exchanged for column in self._groups[k].columns)
        for number in exchanged:
            if (steps := self._steps_of(number)) > 1:
                for s in self._own_of(number):
                    gradients[s.tensor][s.first : s.first + s.length].div_(steps)
        if self._bases is not None:
            tensors = {i for k in exchanged for i in self._groups[k].tensors}
            self._bases.decode_own(gradients, tensors, info.applied)

    def _send_to_owners(
        self, column: Column, values: Sequence[Tensor], residuals: Sequence[Tensor], code: Codec | None, applied: Tensor
    ) -> Exchange:
        """Start sending a column; the returned function stores the means that this replica owns, and the residuals."""
        rows = rows_of(column, column.owners, values, self.options.block, self.context.grad_norm.device)
        error = None if code is None else torch.empty_like(rows)
        handle = self.collectives.reduce_to_owners(rows, column.owners, code, error)

        def finish() -> None:
            for i, slices in enumerate(column.slices):
                for s in slices:
                    new = 0.0 if error is None else error[i, s.at : s.at + s.length]
                    masked_copy_(residuals[s.tensor][s.first : s.first + s.length], new, applied)
            if self.collectives.replica in column.owners:
                self._store_means(column, rows[column.owners.index(self.collectives.replica)], values)

        return handle, finish

    def _encode_to_owners(
        self,
        column: Column,
        values: Sequence[Tensor],
        residuals: Sequence[Tensor],
        code: Codec,
        applied: Tensor,
        factor: float,
    ) -> Exchange:
        """Encode and send values * factor + residuals, and store the new residuals; bitwise as `_send_to_owners`."""
        assert self._to_owners is not None
        messages = self._to_owners.encode(column, values, residuals, factor, applied)
        is_owner = self.collectives.replica in column.owners
        mean = torch.empty(column.width if is_owner else 0, dtype=torch.float32, device=messages.device)
        handle = self.collectives.reduce_messages_to_owners(messages, mean, column.owners, code)
        return handle, partial(self._store_means, column, mean, values)

    def _store_means(self, column: Column, mean: Tensor, values: Sequence[Tensor]) -> None:
        """Copy the row of a column that this replica owns, FP32 (width,), to the gradients."""
        if self.collectives.replica in column.owners:
            for s in column.slices[column.owners.index(self.collectives.replica)]:
                values[s.tensor][s.first : s.first + s.length] = mean[s.at : s.at + s.length]

    def _norm(self, gradients: Sequence[Tensor], exchanged: Sequence[int], applied: Tensor) -> Tensor:
        """Return the norm of the synchronized gradient over the whole model, FP32 (). Collective.

        Other groups count with the gradient of their last exchange; with zero before their first one.
        """
        sound = torch.ones_like(applied)
        for number in exchanged:
            counted = [s for s in self._own_of(number) if self.context.shards[s.tensor].counted]
            own = [gradients[s.tensor][s.first : s.first + s.length] for s in counted]
            squares = torch.zeros((), dtype=torch.float32, device=self.context.grad_norm.device)
            if own:
                squares += torch.stack(torch._foreach_norm(own, 2, torch.float64)).square().sum().float()
            squares = self.collectives.sum_over_owners(squares)
            sound = sound & squares.isfinite()
            masked_copy_(self._squares[number], squares, applied & sound)
        return torch.where(sound, self._squares.sum().sqrt(), torch.inf)

    def _update_own(self, gradients: Sequence[Tensor], number: int, applied: Tensor) -> dict[int, Tensor]:
        """Run the optimizer on the parameters of a group of which this replica owns entries.

        Returns:
            The changes of the weights, FP32 (n,) by shard; the weights are those of before.
        """
        shards, owned = self.context.shards, {s.tensor for s in self._own_of(number)}
        kept = [shard.parameter.grad for shard in shards]
        before: dict[int, Tensor] = {}
        for i, shard in enumerate(shards):
            if i not in owned:
                shard.parameter.grad = None
                continue
            store_gradient(shard, self._owners.only_own(i, gradients[i]))
            before[i] = stored(shard.parameter).clone()
            stored(shard.parameter).sub_(self._unsent.tensors[shard.name])
        steps = self._steps_of(number)
        with self._state_of_others_kept(owned, steps), one_for_several_steps(self.context.optimizer, steps):
            self.optimizer_step([], [], applied)
        for shard, gradient in zip(shards, kept, strict=True):
            shard.parameter.grad = gradient
        changes = {}
        for i, weight in before.items():
            changed = stored(shards[i].parameter)
            changes[i] = (changed - weight).view(-1)
            changed.copy_(weight)
        return changes

    @contextmanager
    def _state_of_others_kept(self, owned: Iterable[int], steps: int) -> Iterator[None]:
        """Restore the optimizer's counters of steps at the end, see `_count_steps`.

        Meanwhile they are divided by `steps`, so that bias corrections with rates to that power are right. Simulated
        replicas share the optimizer: of the entries that others own, the state is restored as well.
        """
        held = []
        for i in owned:
            own = self._owners.own_slices(i)
            others = self.collectives.is_simulated and sum(s.length for s in own) < self.context.shards[i].size
            state = self._tensors_of_state(i)
            held += [(value, value.clone(), own) for key, value in state.items() if key == "step" or others]
            if "step" in state and steps > 1:
                state["step"].copy_(state["step"] / steps)
        try:
            yield
        finally:
            for value, previous, own in held:
                for s in own if value.numel() > 1 else ():
                    part = slice(s.first, s.first + s.length)
                    previous.view(-1)[part] = value.view(-1)[part]
                value.copy_(previous)

    def _count_steps(self, number: int, applied: Tensor) -> None:
        """Count the steps of the optimizer for all parameters of a group, those of other owners included."""
        states = [self._tensors_of_state(i) for i in self._groups[number].tensors]
        counters = [state["step"] for state in states if "step" in state]
        for device in {counter.device for counter in counters}:
            steps = applied.to(device, torch.float64) * self._steps_of(number)
            add_to_each_([counter for counter in counters if counter.device == device], steps)

    def _tensors_of_state(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of the optimizer's state of a shard, local ones, by kind."""
        state = self.context.optimizer.state.get(self.context.shards[number].parameter, {})
        return {kind: local(value) for kind, value in sorted(state.items()) if isinstance(value, Tensor)}

    def _send(self, column: Column, changes: Mapping[int, Tensor], code: Codec | None, applied: Tensor) -> Exchange:
        """Start sending the changes of a column to all replicas; the returned function applies the sent values."""
        owner = self.collectives.replica
        device = self.context.grad_norm.device
        row = rows_of(column, [owner] if owner in column.owners else [], changes, self.options.block, device).view(-1)
        row.masked_fill_(~applied, 0.0)
        handle, messages = self.collectives.gather_from_owners(row, column.width, column.owners, code)

        def finish() -> None:
            weights = [stored(shard.parameter).view(-1) for shard in self.context.shards]
            i = column.owners.index(owner) if owner in column.owners else None
            if code is not None and self._to_replicas is not None:
                if self.collectives.is_writer:  # simulated replicas share one set of weights
                    self._to_replicas.add(column, weights, messages)
                own = None if i is None else decoded_rows(messages[i : i + 1], column.width, code)[0]
            else:
                decoded = decoded_rows(messages, column.width, code)
                if self.collectives.is_writer:
                    add_rows(column, decoded, weights)
                own = None if i is None else decoded[i]
            if i is not None:
                unsent = own - row
                for s in column.slices[i]:
                    target = self._unsent.tensors[self.context.shards[s.tensor].name].view(-1)
                    masked_copy_(target[s.first : s.first + s.length], unsent[s.at : s.at + s.length], applied)

        return handle, finish

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
                if tensor.shape == shard.local_shape:
                    self._owners.broadcast(i, tensor)
                elif kind != "step":
                    self._owners.broadcast_whole(i, tensor)
        if self._bases is not None and self.collectives.is_simulated:
            self._bases.gather()

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

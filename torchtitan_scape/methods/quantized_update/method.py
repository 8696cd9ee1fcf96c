"""Gradients in few bits to the owner of a parameter, and its update in few bits back to all replicas.

Each replica updates a part of the parameters, as in ZeRO (Rajbhandari et al., arXiv:1910.02054), and sends the change
of the weights in a block code, as SDP4Bit does (Jia et al., arXiv:2410.15526), with error feedback in both directions.
With Muon this is EF21-Muon (Gruntkowska et al., arXiv:2510.00643) with a server for every matrix, apart from the error
feedback of the gradients, which is that of 1-bit SGD (Seide et al., 2014).
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.parameters import Shard, check_contiguous, stored
from torchtitan_scape.core.tensors import flat, masked_copy_
from torchtitan_scape.kernels.backends import block_code, choose_backend
from torchtitan_scape.methods.early import ChunkInFlight, EarlyExchange
from torchtitan_scape.methods.interface import ErrorFeedback, Method, MethodContext, State, StepInfo
from torchtitan_scape.methods.owned import OwnedParts, Range
from torchtitan_scape.methods.quantized_update.bases import SharedBases
from torchtitan_scape.methods.quantized_update.columns import columns_of, has_kernels
from torchtitan_scape.methods.quantized_update.layout import Column, divide
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateCost, QuantizedUpdateOptions
from torchtitan_scape.methods.quantized_update.owners import Owners
from torchtitan_scape.methods.update import OptimizerStep, clip_factor
from torchtitan_scape.optimizers.adams import AdamS
from torchtitan_scape.optimizers.algorithms import has_step_of
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.optimizers.registry import FIRST
from torchtitan_scape.optimizers.signsgd import SignSGD
from torchtitan_scape.topology.calls import CollectiveCall
from torchtitan_scape.topology.chunks import double_buffered

logger = logging.getLogger(__name__)
# Optimizers that may update a part of a tensor.
ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, AdamS, SignSGD)
RESIDUAL_DTYPE = torch.bfloat16  # its rounding is small next to the error of a code of 1 to 8 bits, which it feeds back


class QuantizedUpdate(Method, EarlyExchange):
    """One step (W: the weights of all replicas, V: those of an entry's owner, u = W - V: its unsent update).

    1. Each replica encodes gradient plus residual for the owners, and keeps the error as its residual.
    2. The mean of an owner is clipped by the norm over the model.
    3. An owner takes the optimizer's step from V = W - u.
    4. It sends V - W, encoded, to all replicas. They add the decoded change to W; u becomes W - V.

    The errors of step 4 move the weights by less than a step. In the mean of the gradients, which `Quantized` sends
    instead, they would cost more: Muon magnifies the small parts of the gradient.

    A replica owns whole matrices of Muon, so that none repeats the work of another, and blocks of all other parameters.
    It alone has their moments and unsent updates, in FP32; the weights of all replicas may be rounded to BF16.

    With `interval` = K above 1 the parameters are divided into K groups, and a step exchanges one of them. Gradients of
    the others are added to their residuals. The optimizer's step of a parameter has the mean over the last K steps, and
    replaces K updates.
    """

    divides_optimizer_state = sends_weights = supports_overlap = True
    owned: OwnedParts

    def __init__(self, context: MethodContext, options: QuantizedUpdateOptions) -> None:
        super().__init__(context, options)
        shards, replicas, replica = context.shards, self.collectives.replicas, self.collectives.replica
        check_contiguous(shards, options.method_name())
        _check(context.optimizer, shards, options)
        if replica == 0 and replicas > 1 and not isinstance(context.optimizer, Muon):
            _warn_without_muon(shards, options)
        backend = choose_backend(context.kernels, shards[0].device)
        self._code = block_code(backend, options.code, options.block)
        self._update_code = block_code(backend, options.update_code, options.block)
        shorter = min(self._code, self._update_code, key=lambda code: code.block_bytes)
        sizes = [shard.size for shard in shards]
        whole = [i for i, shard in enumerate(shards) if shard.entries and _is_whole(shard, context.optimizer)]
        in_place = has_kernels(backend, self.collectives)
        self._groups = divide(
            sizes,
            [shard.entries if i in whole else 0 for i, shard in enumerate(shards)],
            replicas,
            block=options.block,
            limit=self.collectives.chunk_limit(sum(sizes), shorter if in_place else None),
            limit_in_fp32=self.collectives.chunk_limit(sum(sizes)),
            equal_rows=len(self.collectives.levels) > 1,
            groups=options.interval,
            entries=[shard.entries for shard in shards],
        )
        slices = [s for group in self._groups for s in group.owned_by(replica).values()]
        ranges = {s.tensor: Range(s.first, s.length) for s in slices}
        self.owned = OwnedParts(shards, ranges, whole, context.optimizer, self.collectives)
        self._owners = Owners(len(shards), self._groups, self.collectives)
        self._residual = ErrorFeedback.of(shards, RESIDUAL_DTYPE)
        residuals = list(self._residual.tensors.values())
        self._columns = columns_of(backend, shards, self.collectives, options.block, residuals, self.owned.parts)
        if self.owned.optimizer is not None:
            self.optimizer_step = OptimizerStep(self.owned.optimizer, backend, self.multiply_gradients)
        # By group: the squared norm of the gradient of its last exchange, and the steps that were applied since then.
        # The host reads only later whether a step was applied. Until then it keeps the numbers of the exchanged groups.
        self._squares = torch.zeros(options.interval, dtype=torch.float32, device=shards[0].device)
        self._accumulated = torch.zeros(options.interval, dtype=torch.int64, device="cpu")
        self._last_exchanged: list[int] | None = None
        self._bases: SharedBases | None = None
        if options.whiten_every and replicas > 1 and isinstance(context.optimizer, Muon):
            owners = {shards[i].name: self._owners.of_whole(i) for i in whole}
            self._bases = SharedBases(shards, owners, self.collectives)

    # ------------------------------------------------------------------------------------------ the step

    def step(self, gradients: list[Tensor], info: StepInfo) -> None:
        early = self.overlap is not None and self.overlap.active  # the exchange has started without a request
        full = not early and self.take_full_exchange_request()
        exchanged = list(range(self.options.interval)) if full else [info.number % self.options.interval]
        coded = not full and self.collectives.replicas > 1
        with self._columns.bound():
            means = self._to_owners(gradients, exchanged, coded, early, info)
            self._observe_all(means, exchanged, info)
            own = {number: self._own_gradients(means, number) for number in exchanged}
            applied, factor = self._clip(own, info.applied)
            messages = [self._update(own[number], number, coded, applied, factor) for number in exchanged]
            self._to_replicas(exchanged, messages, coded)
        self._last_exchanged = exchanged

    def _to_owners(
        self, gradients: list[Tensor], exchanged: Sequence[int], coded: bool, early: bool, info: StepInfo
    ) -> list[Tensor]:
        """Return the means of gradients over replicas and steps, where they are exchanged and owned. Collective.

        Gradients of other groups are added to the residuals. Other entries of the result are undefined. Its memory is
        that of the gradients, or of their copies in the bases.
        """
        columns, factor, bases = self._columns, self.context.gradient_scale, self._bases
        with self.context.timer.phase("exchange"):
            if bases is not None:
                if self.options.changes_bases(bases.number_of(info.number)):
                    bases.change(flat(self._residual.tensors.values()), info.applied)
                if early:  # the check has read the gradients themselves
                    gradients = bases.encoded(gradients, range(len(gradients)))
                    bases.copies.clear()
                else:
                    gradients = flat(gradients)
                    bases.whitening.encode(gradients)
            columns.bind(gradients)
            for number, group in enumerate(self._groups):
                if number not in exchanged:
                    columns.add_to_residuals(group.tensors, factor, info.applied)
            if early:
                self.overlap.finish(info)
            else:
                code = self._code if coded else None
                started = (
                    columns.to_owners(column, code, factor, self._steps_of(number), info.applied)
                    for number in exchanged
                    for column in self._groups[number].columns_for(coded)
                )
                double_buffered((handle, partial(finish, info.applied)) for handle, finish in started)
            for number in exchanged if bases is not None else ():
                assert bases is not None
                bases.decode_own(gradients, self._groups[number].tensors, info.applied)
        return gradients

    def _clip(self, own: Mapping[int, Mapping[int, Tensor]], applied: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the norm of the synchronized gradient over the whole model. Collective.

        Other groups count with the gradient of their last exchange; with zero before their first one.

        Args:
            own: Owned parts of the gradients by group and number of the shard.

        Returns:
            Whether the step is applied, bool (), and the factor of clipping, FP32 (), None without clipping.
        """
        context, sound = self.context, torch.ones_like(applied)
        with context.timer.phase("clip"):
            for number, gradients in own.items():
                counted = [gradient for i, gradient in gradients.items() if context.shards[i].counted]
                squares = torch.zeros((), dtype=torch.float32, device=context.grad_norm.device)
                if counted:
                    squares += self.norms(counted).square().sum().float()
                squares = self.collectives.sum_over_owners(squares)
                sound = sound & squares.isfinite()
                masked_copy_(self._squares[number], squares, applied & sound)
            norm = torch.where(sound, self._squares.sum().sqrt(), torch.inf)
            context.grad_norm.copy_(torch.where(applied, norm, torch.nan))
            if context.max_norm is None:
                return applied & sound, None
            factor = clip_factor(context.grad_norm, context.max_norm)
            context.clip_factor.copy_(factor)
            return applied & sound, factor

    def _update(
        self, own: Mapping[int, Tensor], number: int, coded: bool, applied: Tensor, factor: Tensor | None
    ) -> list[Tensor]:
        """Take the optimizer's step on the owned parts of a group, with the means times a factor, FP32 ().

        Returns:
            The encoded changes of the weights by column, uint8 (bytes,).
        """
        steps = self._steps_of(number)
        with self.context.timer.phase("update"):
            if own:
                self._columns.begin_update(list(own), applied)
                with self.owned.step_for(list(own), steps, since=steps - 1) as parts:
                    self.optimizer_step([part.shard for part in parts], list(own.values()), applied, factor)
            columns = self._groups[number].columns_for(coded)
            return self._columns.messages(columns, self._update_code if coded else None, applied)

    def _to_replicas(self, exchanged: Sequence[int], messages: Sequence[list[Tensor]], coded: bool) -> None:
        """Send the changes of the weights to all replicas, and add them. Collective.

        The first layers come first. With overlap, encoded changes may arrive during the next forward pass.
        """
        code, arriving = self._update_code if coded else None, self.arriving
        with self.context.timer.phase("exchange"):
            exchanges = (
                (column, self._columns.to_replicas(column, message, code))
                for number, sent in zip(exchanged, messages, strict=True)
                for column, message in reversed(list(zip(self._groups[number].columns_for(coded), sent, strict=True)))
            )
            if coded and arriving is not None and arriving.is_ready:
                for column, exchange in exchanges:
                    arriving.start(column.tensors(), exchange)
            else:
                double_buffered(exchange for _, exchange in exchanges)

    # ------------------------------------------------------------------------------- during a backward pass

    def early_chunks(self) -> Sequence[Collection[int]]:
        return [column.tensors() for _, column in self._all_columns()]

    def _all_columns(self) -> Iterator[tuple[int, Column]]:
        """Yield the number of the group and the column of all columns."""
        yield from ((number, column) for number, group in enumerate(self._groups) for column in group.columns)

    def begin_early(self, step: int) -> Collection[int]:
        """Return no column if all values are sent in FP32, or if the bases change: only in an applied step they do."""
        if self._full_exchange_requested:
            return ()
        if self._bases is not None:
            self._bases.copies.clear()
            if self.options.changes_bases(self._bases.number_of(step)):
                return ()
        group = step % self.options.interval
        return [i for i, (number, _) in enumerate(self._all_columns()) if number == group]

    def start_early(self, number: int, gradients: Sequence[Tensor | None]) -> ChunkInFlight:
        group, column = list(self._all_columns())[number]
        self._columns.bind(self._bases.encoded(gradients, column.tensors()) if self._bases is not None else gradients)
        scale, steps = self.context.gradient_scale, self._steps_of(group)
        handle, store = self._columns.to_owners(column, self._code, scale, steps, applied=None)

        def finish(info: StepInfo) -> None:
            handle.wait()
            store(info.applied)

        return ChunkInFlight(handle, finish)

    def cancel_early(self) -> None:
        self._columns.gradients = ()
        if self._bases is not None:
            self._bases.copies.clear()

    def _own_gradients(self, gradients: Sequence[Tensor], number: int) -> dict[int, Tensor]:
        """Return the owned parts of the gradients of a group, by number of the shard."""
        parts = self.owned.parts
        return {i: parts[i].within(gradients[i]) for i in self._groups[number].tensors if i in parts}

    def _steps_of(self, number: int) -> int:
        """Return the number of steps whose gradients an exchange of a group contains now."""
        return int(self._accumulated[number]) + 1

    def finish_previous_step(self, applied: bool) -> None:
        if applied and self._last_exchanged is not None:
            self._accumulated += 1
            self._accumulated[self._last_exchanged] = 0
            self.owned.applied += 1
        self._last_exchanged = None

    # ---------------------------------------------------------------------------------------------- state

    def prepare_to_load(self) -> None:
        super().prepare_to_load()
        self._residual.clear(torch.tensor(True, dtype=torch.bool, device="cpu"))
        for part in self.owned.parts.values():
            part.values.zero_()
        self._squares.zero_()
        self._accumulated.zero_()
        self._last_exchanged = None
        self.owned.reset()
        if self._bases is not None:
            self._bases.reset()

    def states(self) -> list[State]:
        migration: Literal["gradient", "pending"] = "gradient" if self._bases is None else "pending"
        unsent = {part.shard.name: part.values.view(-1) for part in self.owned.parts.values()}
        states = [
            State("residual", self._residual.tensors, per_replica=True, on_migration=migration),
            State("unsent_update", unsent, False, "displacement", starts=self.owned.starts()),
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
        return list(states.values())

    def state_dict(self) -> dict[str, Any]:
        moments = {state.kind: dict(state.tensors) for state in self.owned.states()}
        return super().state_dict() | moments | {"applied_steps": self.owned.applied}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        moments = self.owned.states()
        own = {"applied_steps", *(state.kind for state in moments)}
        super().load_state_dict({kind: tensors for kind, tensors in saved.items() if kind not in own})
        for state in moments:
            for name, tensor in state.tensors.items():
                tensor.copy_(saved[state.kind][name])
        self.owned.applied.copy_(saved["applied_steps"])

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

    def pending_square(self, state: State, name: str) -> Tensor:
        # The owner of a matrix has the inverse of its basis. Its residual stands for those of all replicas.
        count = 1 if self._bases is None else self._bases.counted(name)
        return super().pending_square(state, name) * count if count else torch.zeros_like(self._squares[0])

    def moment_and_residual(self, shard: Shard) -> tuple[Tensor | None, Tensor | None]:
        residual = super().moment_and_residual(shard)[1]
        if not any(self.collectives.gather_from_replicas(FIRST in self.owned.moments)):
            return None, residual
        moment = torch.zeros(shard.size, dtype=torch.float32, device=shard.device)
        if (own := self.owned.moments.get(FIRST, {}).get(shard.name)) is not None:
            self.owned.within(shard.name, moment).copy_(own)
        self._owners.broadcast(self.context.shards.index(shard), moment)
        return moment, residual

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


def _check(optimizer: torch.optim.Optimizer, shards: Sequence[Shard], options: QuantizedUpdateOptions) -> None:
    """Raise ValueError for parameters or an optimizer that the method does not support with these options."""
    for shard in shards:
        if (dtype := stored(shard.parameter).dtype) not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"method 'quantized_update' needs weights in FP32 or BF16, and {shard.name!r} is {dtype}; keep the "
                "parameters in FP32 and compute by mixed precision"
            )
    if options.interval > 1 and not has_step_of(optimizer, Muon, *ELEMENTWISE):
        kind, known = type(optimizer), ", ".join(one.__name__ for one in ELEMENTWISE)
        raise ValueError(
            f"[sync.quantized_update] interval = {options.interval} with {kind.__module__}.{kind.__name__}: a step "
            f"for several is known for torchtitan_scape.Muon, {known}; set interval = 1"
        )


def _warn_without_muon(shards: Sequence[Shard], options: QuantizedUpdateOptions) -> None:
    """Warn that the loss suffers, and of blocks with entries of several rows if the matrices have short ones.

    The error of a code is about equal in all entries of a block, and their gradients are not. An optimizer that divides
    every entry by its own size then sees mostly errors in the small ones. Muon's matrices have bases instead.
    """
    columns = min((shard.local_shape[1] for shard in shards if len(shard.local_shape) == 2), default=options.block)
    shorter = max(32, 1 << max(0, columns.bit_length() - 1))
    better = f"; with rows of {columns} entries, set block = {shorter}" if shorter < options.block else ""
    logger.warning(
        "method 'quantized_update' without Muon ended 5 to 6 % above dense training with AdamW (0.2 M parameters, 16 "
        f"replicas); use Muon, or method 'quantized'{better}"
    )

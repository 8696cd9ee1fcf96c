"""Gradients in few bits to the owner of a parameter, and its update in few bits back to all replicas.

Each replica updates a part of the parameters, as in ZeRO (Rajbhandari et al., arXiv:1910.02054), and sends the change
of the weights in a block code, as SDP4Bit does (Jia et al., arXiv:2410.15526), with error feedback in both directions.
With Muon this is EF21-Muon (Gruntkowska et al., arXiv:2510.00643) with a server for every matrix, apart from the error
feedback of the gradients, which is that of 1-bit SGD (Seide et al., 2014).
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.parameters import Shard, check_contiguous, stored
from torchtitan_scape.core.tensors import flat, masked_copy_
from torchtitan_scape.kernels.backends import block_code
from torchtitan_scape.methods.base import OptimizerStep
from torchtitan_scape.methods.interface import ErrorFeedback, Method, MethodContext, State, StepInfo
from torchtitan_scape.methods.overlap import EarlyExchange
from torchtitan_scape.methods.owned import OwnedParts
from torchtitan_scape.methods.quantized_update.bases import WhiteningBases
from torchtitan_scape.methods.quantized_update.columns import SentGradients, columns_of, has_kernels
from torchtitan_scape.methods.quantized_update.layout import Column, ExchangeGroup, divide, slices_with_owners
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
from torchtitan_scape.optimizers.elementwise import AdamS, SignSGD
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.optimizers.pytorch import has_step_of
from torchtitan_scape.optimizers.registry import FIRST
from torchtitan_scape.topology.chunks import double_buffered
from torchtitan_scape.topology.traffic import CollectiveCall

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

    sends_weights = True
    owned: OwnedParts
    optimizer_step: OptimizerStep  # of a replica that owns something

    def __init__(self, context: MethodContext, options: QuantizedUpdateOptions) -> None:
        super().__init__(context, options)
        shards, replicas, replica = context.shards, self.collectives.replicas, self.collectives.replica
        check_contiguous(shards, options.method_name())
        _check(context.optimizer, shards, options)
        if replica == 0 and replicas > 1 and not isinstance(context.optimizer, Muon):
            _warn_without_muon(shards, options)
        self._code = block_code(self.backend, options.code, options.block)
        self._update_code = block_code(self.backend, options.update_code, options.block)
        shorter = min(self._code, self._update_code, key=lambda code: code.block_bytes)
        sizes = [shard.size for shard in shards]
        whole = [i for i, shard in enumerate(shards) if shard.entries and _is_whole(shard, context.optimizer)]
        in_place = has_kernels(self.backend, self.collectives)
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
        self._owners = slices_with_owners(self._groups, len(shards))
        owned = {i: s for i, slices in enumerate(self._owners) for owner, s in slices if owner == replica}
        self.owned = OwnedParts(shards, owned, whole, context.optimizer, self.collectives)
        self._residual = ErrorFeedback.of(shards, RESIDUAL_DTYPE)
        residuals = list(self._residual.tensors.values())
        self._columns = columns_of(self.backend, shards, self.collectives, options.block, residuals, self.owned.parts)
        if self.owned.optimizer is not None:
            self.optimizer_step = OptimizerStep(self.owned.optimizer, self.backend, self.multiply_gradients)
        # By group: the squared norm of the gradient of its last exchange, and the steps that were applied since then.
        # The host reads only later whether a step was applied. Until then it keeps the numbers of the exchanged groups.
        self._squares = torch.zeros(options.interval, dtype=torch.float32, device=shards[0].device)
        self._accumulated = torch.zeros(options.interval, dtype=torch.int64, device="cpu")
        self._last_exchanged: list[int] | None = None
        self._bases: WhiteningBases | None = None
        if options.whiten_every and replicas > 1 and isinstance(context.optimizer, Muon):
            owners = {shards[i].name: self._owners[i][0][0] for i in whole}
            self._bases = WhiteningBases(shards, owners, self.collectives, options.whiten_every)

    # ------------------------------------------------------------------------------------------ the step

    def step(self, gradients: list[Tensor], info: StepInfo) -> None:
        early = self.overlap is not None and self.overlap.active  # the exchange has started without a request
        full = not early and self.take_full_exchange_request()
        groups = [group for group in self._groups if full or self._is_due(group, info.number)]
        coded = not full and self.collectives.replicas > 1
        phase = self.context.timer.phase
        with self._columns.bound():
            with phase("exchange"):  # 1.
                means = self._exchange_gradients(gradients, groups, coded, early, info)
            self._observe_all(means, groups, info)
            parts = self.owned.parts
            own = [{i: parts[i].within(means[i]) for i in group.tensors if i in parts} for group in groups]
            with phase("clip"):  # 2.
                applied, factor = self._clip(own, groups, info.applied)
            with phase("update"):  # 3.
                for group, gradients_of_group in zip(groups, own, strict=True):
                    self._update(gradients_of_group, self._steps_of(group), applied, factor)
                changes = [
                    (column, self._columns.change(column, self._update_code if coded else None, applied))
                    for group in groups
                    for column in (group.columns if coded else group.in_fp32)
                ]
            with phase("exchange"):  # 4.
                self._send_changes(changes, coded)
        self._last_exchanged = [group.number for group in groups]

    def _is_due(self, group: ExchangeGroup, step: int) -> bool:
        return group.number == step % self.options.interval

    def _exchange_gradients(
        self, gradients: list[Tensor], groups: Sequence[ExchangeGroup], coded: bool, early: bool, info: StepInfo
    ) -> list[Tensor]:
        """Return the means of gradients over replicas and steps, of the entries of `groups` that this replica owns.

        Gradients of other groups are added to the residuals. Other entries of the result are undefined. Its memory is
        that of the gradients, or of their copies in the bases. Collective.
        """
        columns, factor, bases = self._columns, self.context.gradient_scale, self._bases
        if bases is not None:
            if bases.is_due(info.number):
                bases.change(self._residual.tensors, info.applied)
            if early:  # the check has read the gradients themselves
                gradients = bases.encoded(gradients, range(len(gradients)))
                bases.copies.clear()
            else:
                gradients = flat(gradients)
                bases.encode(gradients)
        columns.bind(gradients)
        for group in self._groups:
            if group not in groups:
                columns.add_to_residuals(group.tensors, factor, info.applied)
        if early:
            self.overlap.finish(info)
        else:
            started = (
                columns.send_gradients(
                    column, self._code if coded else None, factor, self._steps_of(group), info.applied
                )
                for group in groups
                for column in (group.columns if coded else group.in_fp32)
            )
            double_buffered((sent.handle, partial(columns.receive_mean, sent, info.applied)) for sent in started)
        if bases is not None:
            bases.decode_and_observe(gradients, info.applied, {i for group in groups for i in group.tensors})
        return gradients

    def _clip(
        self, own: Sequence[Mapping[int, Tensor]], groups: Sequence[ExchangeGroup], applied: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the norm of the synchronized gradient over the whole model. Collective.

        Other groups count with the gradient of their last exchange; with zero before their first one.

        Args:
            own: Owned parts of the gradients of each group, by number of the shard.

        Returns:
            Whether the step is applied, bool (), and the factor of clipping, FP32 (), None without clipping.
        """
        context, sound = self.context, torch.ones_like(applied)
        for group, gradients in zip(groups, own, strict=True):
            counted = [gradient for i, gradient in gradients.items() if context.shards[i].counted]
            squares = torch.zeros((), dtype=torch.float32, device=context.grad_norm.device)
            if counted:
                squares += self.norms(counted).square().sum().float()
            squares = self.collectives.sum_over_owners(squares)
            sound = sound & squares.isfinite()
            masked_copy_(self._squares[group.number], squares, applied & sound)
        norm = torch.where(sound, self._squares.sum().sqrt(), torch.inf)
        return applied & sound, self.set_norm(norm, applied)

    def _update(self, own: Mapping[int, Tensor], steps: int, applied: Tensor, factor: Tensor | None) -> None:
        """Take the optimizer's step on owned parts, with their gradients times a factor, FP32 (), for some steps."""
        if own:
            self._columns.begin_update(list(own), applied)
            with self.owned.step_for(list(own), steps, since=steps - 1) as parts:
                self.optimizer_step([part.shard for part in parts], list(own.values()), applied, factor)

    def _send_changes(self, changes: Sequence[tuple[Column, Tensor]], coded: bool) -> None:
        """Send the changes of the weights to all replicas, and add them. Collective.

        The first layers come first. With overlap, encoded changes may arrive during the next forward pass.
        """
        code, arriving = self._update_code if coded else None, self.arriving
        started = (self._columns.send_change(column, code, message) for column, message in reversed(changes))
        exchanges = ((sent.handle, partial(self._columns.receive_change, sent)) for sent in started)
        if coded and arriving is not None and arriving.is_ready:
            for (column, _), exchange in zip(reversed(changes), exchanges, strict=True):
                arriving.start(column.tensors(), exchange)
        else:
            double_buffered(exchanges)

    def _steps_of(self, group: ExchangeGroup) -> int:
        """Return the number of steps whose gradients an exchange of a group contains now."""
        return int(self._accumulated[group.number]) + 1

    def finish_previous_step(self, applied: bool) -> None:
        if applied and self._last_exchanged is not None:
            self._accumulated += 1
            self._accumulated[self._last_exchanged] = 0
            self.owned.applied += 1
        self._last_exchanged = None

    # ------------------------------------------------------------------------------- during a backward pass

    @property
    def _all_columns(self) -> list[tuple[ExchangeGroup, Column]]:
        return [(group, column) for group in self._groups for column in group.columns]

    def early_chunks(self) -> Sequence[Collection[int]]:
        return [column.tensors() for _, column in self._all_columns]

    def begin_early(self, step: int) -> Collection[int]:
        """Return no column if all values are sent in FP32, or if the bases change."""
        if self._full_exchange_requested:
            return ()
        if self._bases is not None:
            self._bases.copies.clear()
            if self._bases.is_due(step):
                return ()
        return [i for i, (group, _) in enumerate(self._all_columns) if self._is_due(group, step)]

    def start_early(self, number: int, gradients: Sequence[Tensor | None]) -> SentGradients:
        group, column = self._all_columns[number]
        self._columns.bind(self._bases.encoded(gradients, column.tensors()) if self._bases is not None else gradients)
        scale, steps = self.context.gradient_scale, self._steps_of(group)
        return self._columns.send_gradients(column, self._code, scale, steps, applied=None)

    def finish_early(self, sent: SentGradients, info: StepInfo) -> None:
        self._columns.receive_mean(sent, info.applied)

    def cancel_early(self) -> None:
        self._columns.gradients = ()
        if self._bases is not None:
            self._bases.copies.clear()

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
        return states if self._bases is None else [*states, *self._bases.states()]

    def declared_states(self) -> list[State]:
        # The owner of a matrix alone has all tensors of its basis.
        declared = {} if self._bases is None else {state.kind: state for state in self._bases.states(declared=True)}
        return [declared.get(state.kind, state) for state in self.states()]

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
        tensors = []
        for shard in self.context.shards:
            of_basis = [] if self._bases is None else self._bases.replicated(shard.name)
            tensors.append(ReplicatedTensors(shard.name, [(None, stored(shard.parameter)), *of_basis]))
        return tensors

    # -------------------------------------------------------------------------------------------- reports

    def collective_calls(self) -> list[CollectiveCall]:
        if self.collectives.replicas == 1:
            return []
        options: QuantizedUpdateOptions = self.options
        return options.calls_of(self._groups, self.local_model(), self.collectives.replicas, self._bases is not None)

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
        self._broadcast(self.context.shards.index(shard), moment)
        return moment, residual

    def density(self) -> float:
        return 1.0 / self.options.interval

    def _observe_all(self, means: Sequence[Tensor], groups: Sequence[ExchangeGroup], info: StepInfo) -> None:
        """Pass the synchronized gradients to the observer. Collective in a step that is observed."""
        if self.is_observed:
            seen = [torch.full_like(mean, torch.nan) for mean in means]
            for i in (i for group in groups for i in group.tensors):
                seen[i].copy_(means[i])
                self._broadcast(i, seen[i])
            self._observe(seen, info)

    def _broadcast(self, number: int, tensor: Tensor) -> None:
        """Replace a contiguous tensor of a shard's shape by the values of the owners. Collective."""
        for owner, s in self._owners[number]:
            self.collectives.broadcast_from(tensor.view(-1)[s.first : s.first + s.length], owner)


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
        "method 'quantized_update' without Muon ended 6.4 % above dense training with AdamW (0.2 M parameters, 16 "
        f"replicas); use Muon, or method 'quantized'{better}"
    )

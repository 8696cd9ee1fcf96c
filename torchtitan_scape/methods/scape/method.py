"""SCAPE: AdamS whose replicas exchange a sparse first moment (SCAPE paper, Algorithm 1)."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_scape.core.bf16_weights import ScaledTensor, hold_in_bfloat16, share_scale
from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.parameters import Shard, StoredTensors, local, stored
from torchtitan_scape.core.tensors import sum_of_squares
from torchtitan_scape.kernels.backends import block_code, scape_passes
from torchtitan_scape.kernels.common.launching import LatestResult
from torchtitan_scape.kernels.common.tensors import Rates
from torchtitan_scape.kernels.scape.blocks import BlockLayout, Ownership, density_at
from torchtitan_scape.kernels.scape.passes import ScapePasses
from torchtitan_scape.kernels.scape.reference import unpack_bits
from torchtitan_scape.kernels.scape.step import PassInputs, PayloadPlan, ShardedUpdate
from torchtitan_scape.methods.interface import Method, MethodContext, State, StepInfo
from torchtitan_scape.methods.scape.exchange import (
    DelayedMasks,
    GradientRecorder,
    PayloadInFlight,
    ReplicatedExchange,
    ShardedExchange,
)
from torchtitan_scape.methods.scape.options import ScapeOptions, payload_entries
from torchtitan_scape.methods.scape.state import ScapeImport, StateByParameter
from torchtitan_scape.topology.partition import chunk_limit
from torchtitan_scape.topology.stages import Codec

logger = logging.getLogger(__name__)

# About as many chunks of a large payload, unless the cost model chooses their size.
CHUNKS = 8


class ScapeMethod(Method):
    """AdamS with a sparse, delayed-mask exchange of the first moment over replicas.

    The method performs the update itself. It reads lr, betas, eps and weight_decay from `context.optimizer`, which
    stores no state (`AdamS(..., allocate_state=False)`). Gradients are used as scratch space.

    Keep the parameters in FP32, or with a sharded update convert them with `core.bf16_weights.hold_in_bfloat16`. Of the
    n/N entries of converted parameters that this replica owns there is an FP32 master copy here. Parameters of other
    dtypes have no master copy, so that updates below their rounding are lost.

    On a GPU the host does not wait for the current step, only for the finite check of the previous one.

    Attributes:
        ordered: The shards in the order of the state and of the payload, sparsified ones first.
        passes: The computation of a step, on Triton or PyTorch.
        payload_exchange: The communication of the payload, and of the new values of a sharded update.
        masks: The masks in use, and the exchange of the next one.
        stored_tensors: Returns the parameters' stored tensors, in the order of `ordered`.
        attempted_steps: Number of attempted steps of the run.
        applied_steps: Number of applied steps, float64 (), on the device.
    """

    gradient_dtype = None
    steps_optimizer = False
    options: ScapeOptions

    def __init__(self, context: MethodContext, options: ScapeOptions) -> None:
        super().__init__(context, options)
        shards, replicas = list(context.shards), context.collectives
        check_one_device(shards)
        check_weights(shards, options)
        sparse = [shard for shard in shards if shard.parameter.ndim > 1]
        dense = [shard for shard in shards if shard.parameter.ndim < 2]
        self.ordered = sparse + dense
        numbers = {id(shard): number for number, shard in enumerate(shards)}
        self._order = [numbers[id(shard)] for shard in self.ordered]
        self._logs = replicas.is_writer and (not dist.is_initialized() or dist.get_rank() == 0)
        device = local(shards[0].parameter).device
        backend = self._backend_of_passes()
        codec = warmup = None
        if options.code != "float32" and replicas.replicas > 1 and options.density < 1.0:
            codec, warmup = block_code(backend, options.code), block_code(backend, "int8")
        self.passes = self._build_passes(sparse, dense, codec, device, backend)
        kind = ReplicatedExchange if self.passes.owner is None else ShardedExchange
        self.payload_exchange = kind(self.passes, replicas, codec, warmup)
        self.masks = DelayedMasks(self.passes, replicas, device)
        self.stored_tensors = StoredTensors(self.ordered)
        # Most tensors of the passes share their rates: one shard for each kind of rates, and the kind of each tensor.
        shards_of_passes = [self.shard_of(i) for i in range(len(self.passes.sizes))]
        self._rate_kinds = [(shard.group, shard.counted) for shard in shards_of_passes]
        self._shards_by_kind = dict(zip(self._rate_kinds, shards_of_passes, strict=True))
        self._latest_rates = LatestResult[list[Rates]]()
        self.attempted_steps = 0
        self._applied: Tensor | None = None  # the flag of the last step
        self.applied_steps = torch.zeros((), dtype=torch.float64, device=device)

    @classmethod
    def prepare_model(cls, model: nn.Module, options: ScapeOptions) -> None:
        if options.weights_dtype == "bfloat16":
            hold_in_bfloat16(model, scaled=True)

    # ------------------------------------------------------------------------------------------ the step

    def step(self, gradients: list[Tensor], info: StepInfo) -> None:
        """Run one step of Algorithm 1. Gradients are FP32 or BF16, of any shape, and are overwritten.

        The numbers are those of docs/explanation/scape.md.
        """
        phase, passes, exchange = self.context.timer.phase, self.passes, self.payload_exchange
        clips, recorder = self.context.max_norm is not None, None
        if self.observer is not None:
            recorder = GradientRecorder(passes, exchange, self.ordered, self.observer)
        with phase("pack"):
            inputs = self._inputs([gradients[number] for number in self._order], info)
            passes.bind(inputs)
        in_flight: list[PayloadInFlight] = []
        for chunk in passes.parts:
            with phase("pack"):
                passes.pack(chunk)  # 1 new moment, 2 next mask, 4 residual
            with phase("exchange"):
                in_flight.append(exchange.start(chunk))  # 3 payload
        with phase("pack"):
            selected = passes.selected()
        for sent in in_flight:
            with phase("exchange"):
                exchange.wait(sent)
            if recorder is not None:
                with phase("observe"):
                    recorder.add(sent.chunk)
            with phase("clip"):
                passes.squares(sent.chunk)  # 5 gradient
            if not clips:
                with phase("update"):
                    passes.update(sent.chunk)
        if recorder is not None:
            with phase("observe"):
                recorder.finish()
        with phase("clip"):
            self._clip(exchange.norm_squared(passes.norm_squared().float()).sqrt())  # 6 clipping
        for chunk in passes.parts if clips else ():
            with phase("update"):
                passes.update(chunk)  # 7 moments, 8 update
        with phase("exchange"):
            exchange.publish()
        with phase("update"):
            passes.write(own_only=self.collectives.is_fake)
        passes.release()
        with phase("exchange"):
            # The masks are received in the payload's buffer, which this step does not use any more.
            self.masks.exchange(selected, inputs.next_density)

    def _inputs(self, gradients: list[Tensor], info: StepInfo) -> PassInputs:
        parameters, options = self.stored_tensors(), self.options
        if self.attempted_steps == 0 and self.passes.owner is not None:
            # Not in `__init__`, because weights may be loaded into the parameters before the first step.
            self.passes.owner.start_master(parameters)
        self.attempted_steps += 1
        self._applied = info.applied
        self.applied_steps += info.applied
        return PassInputs(
            parameters,
            gradients,
            self._rates_of_tensors(),
            self.masks.in_use,
            self.masks.previous,
            density_at(self.attempted_steps + 1, options.density, options.density_warmup_steps),
            info.applied,
            self.applied_steps,
            self.context.clip_factor,
            options.clip_mode == "moment",
        )

    def _clip(self, norm: Tensor) -> None:
        """Set the clip factor by the norm of the synchronized gradient, FP32 (). A non-finite norm skips the update."""
        applied = self.passes.step.applied
        if self.set_norm(norm, applied) is None:
            return
        sound = self.context.grad_norm.isfinite()
        self.applied_steps -= (applied & ~sound).double()
        self.passes.leave_out_update(unless=sound)
        self._applied = self.passes.step.applied

    def _rates_of_tensors(self) -> list[Rates]:
        """Return the rates of the tensors of the passes: the same objects as in the last step unless they changed."""
        by_kind = {kind: self._rates(shard) for kind, shard in self._shards_by_kind.items()}
        return self._latest_rates.get(by_kind, lambda: [by_kind[kind] for kind in self._rate_kinds])

    def _rates(self, shard: Shard) -> Rates:
        rates = Rates.of(self.param_groups[shard.group], self.context.gradient_scale, shard.counted)
        decay = rates.lr * rates.weight_decay
        if self.options.weights_dtype == "bfloat16" and decay > 0.5:
            raise ValueError(f"lr * weight_decay is {decay:g}; with weights in BF16 it must be 0.5 or less")
        return rates

    def finish_previous_step(self, applied: bool) -> None:
        self.masks.rotate(applied)

    @torch.no_grad()
    def request_full_exchange(self) -> None:
        """Make the next step dense: the mask is all ones, so that no residual remains. Collective."""
        if self.attempted_steps == 0 or self.masks.in_use.dense:
            return
        self.passes.finish()
        self.state.release_code_residual()
        self.masks.in_use.density = 1.0

    def prepare_to_load(self) -> None:
        super().prepare_to_load()
        self.passes.finish()  # before the masks of the moments change
        if self.passes.visits is not None:
            self.passes.visits.rates.zero_()
            self.passes.visits.relative.fill_(1.0)

    # -------------------------------------------------------------------------------------- construction

    def _backend_of_passes(self) -> str:
        """Return "triton" or "torch": selection "tensor" (the paper's) is implemented in PyTorch only.

        Raises:
            ValueError: The option `kernels` is "triton" and the selection is "tensor".
        """
        if self.options.selection != "tensor" or self.backend == "torch":
            return self.backend
        if self.context.kernels == "triton":
            raise ValueError(
                "kernels is 'triton', but selection 'tensor' runs in PyTorch only; set kernels to 'auto', or selection "
                "to 'block'"
            )
        if self._logs:
            logger.warning("selection 'tensor' runs in PyTorch, not in Triton")
        return "torch"

    def _build_passes(
        self, sparse: Sequence[Shard], dense: Sequence[Shard], codec: Codec | None, device: torch.device, backend: str
    ) -> ScapePasses:
        """Return the passes over the sparsified shards, and then those that are exchanged whole."""
        options, replicas = self.options, self.collectives
        message_bytes = None if codec is None else codec.message_bytes
        sent = payload_entries([s.local_shape for s in self.ordered], options.density, options.block_size)
        # Parts of one buffer need no memory of their own: as few chunks as let the first ones be sent early.
        limit = max(chunk_limit(sent, replicas.replicas, message_bytes), -(-sent // CHUNKS))
        plan = PayloadPlan(
            options.selection,
            options.density,
            replica=None if replicas.is_fake else replicas.replica,  # a dry run has no other replicas that select
            chunk_entries=(options.chunk_bytes // 4 or limit) if replicas.replicas > 1 else 0,
            chunk_multiple=replicas.size_multiple(codec),
            size_multiple=codec.block_size if codec else 1,
            keeps_code_error=codec is not None,
        )
        layout = BlockLayout(tuple(s.size for s in sparse), options.block_size, replicas.replicas)
        if options.selection == "block" and sparse and round(options.density * options.block_size) == 0 and self._logs:
            logger.warning(
                f"density {options.density:g} is less than one entry per block of {options.block_size}: one is "
                f"selected per block, which is a density of {layout.share(options.density):.3g}"
            )
        dense_sizes = [s.size for s in dense]
        owner = None
        if options.update == "sharded":
            owner = self._owner(Ownership.of(layout, dense_sizes), device)
        return scape_passes(
            backend,
            layout,
            dense_sizes,
            plan,
            device,
            owner=owner,
            writes=replicas.is_writer,
            offload="state" in options.offload,
            columns=tuple(s.columns for s in sparse) if options.staleness_scaling else None,
        )

    def _owner(self, ownership: Ownership, device: torch.device) -> ShardedUpdate:
        """Return the slices of the sharded update. Raises ValueError if a parameter is not contiguous."""
        for shard in self.ordered:
            if not stored(shard.parameter).is_contiguous():
                raise ValueError(
                    f"{shard.name!r} is not contiguous; update = 'sharded' divides tensors into slices: make it "
                    "contiguous"
                )
        scaled = self.options.weights_dtype == "bfloat16"
        owner = ShardedUpdate(ownership, self.collectives.replica, device, scaled)
        # There is one scale per slice, or none. All slices of a tensor have the same scale, so the last one is used.
        for (number, _, _), scale in zip(owner.slices, owner.scales, strict=False):
            share_scale(self.ordered[number].parameter, scale, self.collectives.is_writer)
        owner.load_scales(owner.scales)
        return owner

    @property
    def last_applied(self) -> bool:
        """Whether the last step was applied. Waits for the device."""
        return self._applied is None or bool(self._applied)

    def shard_of(self, tensor: int) -> Shard:
        """Return the shard that contains a tensor of the passes."""
        return self.ordered[self.passes.slices[tensor][0]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.context.optimizer.param_groups

    # --------------------------------------------------------------------------------- state and reports

    @property
    def state(self) -> StateByParameter:
        """The state by parameter, without a copy of its own."""
        return StateByParameter(self)

    def states(self) -> list[State]:
        return self.state.states("exact")

    def declared_states(self) -> list[State]:
        return self.state.declared()

    def checkpoint_states(self, residual: str) -> list[State]:
        return self.state.states(residual)

    def record(self) -> dict[str, Any]:
        return {"scape": self.state.record(), "applied_steps": self.applied_steps.item()}

    def begin_import(self, reader: Any, same_layout: bool) -> ScapeImport:
        return ScapeImport(self.state, reader, same_layout)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"record": self.state.record()}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        state = self.state
        self.passes.finish()
        state.put_record(saved["record"])
        for i, name in enumerate(state.names):
            state.put_saved(i, {kind: tensors[name] for kind, tensors in saved.items() if name in tensors})
        for layout_state in state.layout_states():
            layout_state.tensors["all"].copy_(saved[layout_state.kind]["all"])
        state.apply_layout_states()

    def replicated_tensors(self) -> list[ReplicatedTensors]:
        return self.state.replicated_tensors()

    @torch.no_grad()
    def moment_and_residual(self, shard: Shard) -> tuple[Tensor, Tensor]:
        return self.state.moment_and_residual(shard.name)

    @torch.no_grad()
    def metrics(self, local: bool = False) -> dict[str, float]:
        """Return density, nnz, overlap with the previous mask, and residual norm. Collective unless `local`.

        "nnz" is the number of mask entries of one replica. "residual_norm" is the root mean square over replicas; with
        a sharded update it excludes the part of the residual that all replicas share. This reads the whole state.
        """
        masks, layout = self.masks.moment_masks(self.last_applied), self.masks.layout
        sums = torch.zeros(4, dtype=torch.float64, device=self.applied_steps.device)
        kept = self.passes.kept()
        for i, size in enumerate(layout.sizes):
            if not self.shard_of(i).counted:
                continue
            used, before = (_unpacked(layout.bits(mask, i), size, sums.device) for mask in masks)
            residual = kept[i].to(sums.device).masked_fill(used, 0.0)
            entries = torch.tensor(float(size), dtype=torch.float64, device=sums.device)
            sums += torch.stack(
                [entries, used.sum().double(), (used & before).sum().double(), sum_of_squares(residual)]
            )
        total, nnz, common, squares = self.mean_over_replicas(sums, local).tolist()
        return {
            "density": nnz / total if total else 1.0,
            "nnz": nnz,
            "mask_overlap": common / nnz if nnz else 1.0,
            "residual_norm": squares**0.5,
        }

    def payload_chunks(self) -> int:
        return len(self.passes.parts)


def _unpacked(bits: Tensor | None, count: int, device: torch.device) -> Tensor:
    if bits is None:
        return torch.ones(count, dtype=torch.bool, device=device)
    return unpack_bits(bits, count)


# ------------------------------------------------------------------------------------- checks of the parameters


def check_one_device(shards: list[Shard]) -> None:
    """Raise ValueError if the parameters are on several devices."""
    first = local(shards[0].parameter).device
    for shard in shards:
        if (device := local(shard.parameter).device) != first:
            raise ValueError(
                f"parameter {shard.name!r} is on {device}, {shards[0].name!r} on {first}; Scape keeps all its state on "
                "one device: move the model to one device, or use one optimizer per device"
            )


def check_weights(shards: list[Shard], options: ScapeOptions) -> None:
    """Raise ValueError if the storage of the parameters does not match `weights_dtype`."""
    in_bf16 = [isinstance(local(s.parameter), ScaledTensor) for s in shards]
    if any(in_bf16) and not all(in_bf16):
        other = shards[in_bf16.index(False)].name
        raise ValueError(f"{other!r} is not stored in BF16, but other parameters are; convert all: hold_in_bfloat16")
    if in_bf16[0] != (options.weights_dtype == "bfloat16"):
        storage = "stored in BF16" if in_bf16[0] else "not converted"
        advice = "set it to 'bfloat16'" if in_bf16[0] else "call hold_in_bfloat16 on the model, or set it to 'float32'"
        raise ValueError(f"weights_dtype is {options.weights_dtype!r}, but the parameters are {storage}: {advice}")

"""SCAPE: AdamS whose replicas exchange a sparse first moment (SCAPE paper, Algorithm 1)."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.parameters import Shard
from torchtitan_scape.kernels.common.rates import Rates
from torchtitan_scape.kernels.scape.blocks import density_at
from torchtitan_scape.kernels.scape.step import PassInputs, PayloadChunk
from torchtitan_scape.methods.interface import State, StepInfo
from torchtitan_scape.methods.scape.components import ScapeComponents
from torchtitan_scape.methods.scape.exchange import PayloadInFlight
from torchtitan_scape.methods.scape.importing import ScapeImport
from torchtitan_scape.methods.scape.recorder import GradientRecorder
from torchtitan_scape.methods.scape.shared import replicated_by_scape
from torchtitan_scape.methods.scape.state import StateByParameter
from torchtitan_scape.methods.scape.statistics import metrics

logger = logging.getLogger(__name__)


class ScapeMethod(ScapeComponents):
    """AdamS with a sparse, delayed-mask exchange of the first moment over replicas.

    The method performs the update itself. It reads lr, betas, eps and weight_decay from `context.optimizer`, which
    stores no state (`AdamS(..., allocate_state=False)`). Gradients are used as scratch space.

    Keep the parameters in FP32, or convert them with `core.bf16_weights.hold_in_bfloat16`. Converted parameters have an
    FP32 master copy here: of the n/N entries that this replica owns if the update is sharded, otherwise of all entries.
    Parameters of other dtypes have no master copy, so that updates below their rounding are lost.

    On a GPU the host does not wait for the current step, only for the finite check of the previous one.
    """

    # ------------------------------------------------------------------------------------------ the step

    def step(self, gradients: list[Tensor], info: StepInfo) -> None:
        """Run one step of Algorithm 1. Gradients are FP32 or BF16, of any shape, and are overwritten."""
        phase, passes, exchange = self.context.timer.phase, self.passes, self.payload_exchange
        with phase("pack"):
            inputs = self._inputs([gradients[number] for number in self._order], info)
            passes.bind(inputs)
        in_flight: list[PayloadInFlight] = []
        for chunk in passes.parts:
            with phase("pack"):
                passes.pack(chunk)
            with phase("exchange"):
                in_flight.append(exchange.start(chunk))
        with phase("pack"):
            selected = passes.selected()
        for chunk in self._clipped(in_flight):
            with phase("update"):
                passes.update(chunk)
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
        if self.attempted_steps == 0:
            # Not in `__init__`, because weights may be loaded into the parameters before the first step.
            self.passes.start_master(parameters)
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

    def _clipped(self, in_flight: list[PayloadInFlight]) -> Iterator[PayloadChunk]:
        """Wait for the chunks, compute the norm, and yield each chunk when it can be updated.

        Without clipping a chunk is yielded when it was received, otherwise after the last one, when the norm is known.
        """
        context, phase = self.context, self.context.timer.phase
        recorder = None if self.observer is None else GradientRecorder(self, self.observer)
        for exchange in in_flight:
            with phase("exchange"):
                exchange.wait()
            if recorder is not None:
                with phase("observe"):
                    recorder.add(exchange.chunk)
            with phase("clip"):
                self.passes.squares(exchange.chunk)
            if context.max_norm is None:
                yield exchange.chunk
        if recorder is not None:
            with phase("observe"):
                recorder.finish()
        with phase("clip"):
            norm = self.payload_exchange.norm_squared(self.passes.norm_squared().float()).sqrt()
            # The payload's norm does not show a NaN outside the mask.
            context.grad_norm.copy_(torch.where(self.passes.step.applied, norm, torch.nan))
            if context.max_norm is not None:
                context.clip_factor.copy_((context.max_norm / (context.grad_norm + 1e-6)).clamp(max=1.0))
                self._update_if(context.grad_norm.isfinite())
        if context.max_norm is not None:
            yield from (exchange.chunk for exchange in in_flight)

    def _update_if(self, sound: Tensor) -> None:
        """Leave out the update of the bound step unless `sound`, bool ()."""
        step = self.passes.step
        self.applied_steps -= (step.applied & ~sound).double()
        self._applied = step.applied & sound
        self.passes.step = replace(step, applied=self._applied)

    def _rates_of_tensors(self) -> list[Rates]:
        """Return the rates of the tensors of the passes: the same objects as in the last step unless they changed."""
        by_kind = {kind: self._rates(shard) for kind, shard in self._shards_by_kind.items()}
        return self._latest_rates.get(by_kind, lambda: [by_kind[kind] for kind in self._rate_kinds])

    def _rates(self, shard: Shard) -> Rates:
        rates = Rates.of(self.param_groups[shard.group], self.context.gradient_scale, shard.counted)
        decay = rates.lr * rates.weight_decay
        if self.options.update == "sharded" and self.bf16_weights and decay > 0.5:
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
        StateByParameter(self).release_code_residual()
        self.masks.in_use.density = 1.0

    def prepare_to_load(self) -> None:
        super().prepare_to_load()
        self.passes.finish()  # before the masks of the moments change
        if self.passes.visits is not None:
            self.passes.visits.rates.zero_()
            self.passes.visits.relative.fill_(1.0)

    # --------------------------------------------------------------------------------- state and reports

    def states(self) -> list[State]:
        return StateByParameter(self).states("exact")

    def declared_states(self) -> list[State]:
        return StateByParameter(self).declared()

    def checkpoint_states(self, residual: str) -> list[State]:
        return StateByParameter(self).states(residual)

    def checkpoint_sizes(self, residual: str) -> dict[str, int]:
        return StateByParameter(self).sizes(residual)

    def record(self) -> dict[str, Any]:
        return {"scape": StateByParameter(self).record(), "applied_steps": self.applied_steps.item()}

    def begin_import(self, reader: Any, same_layout: bool, step: int) -> ScapeImport:
        return ScapeImport(self, reader, same_layout, step)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        return StateByParameter(self).whole()

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        StateByParameter(self).put_whole(saved)

    def replicated_tensors(self) -> list[ReplicatedTensors]:
        return replicated_by_scape(self)

    @torch.no_grad()
    def moment_and_residual(self, shard: Shard) -> tuple[Tensor, Tensor]:
        return StateByParameter(self).moment_and_residual(shard.name)

    @torch.no_grad()
    def metrics(self, local: bool = False) -> dict[str, float]:
        """Return density, nnz, overlap with the previous mask, and residual norm. Collective unless `local`.

        "nnz" is the number of mask entries of one replica. "residual_norm" is the root mean square over replicas; with
        a sharded update it excludes the part of the residual that all replicas share. This reads the whole state.
        """
        return metrics(self, local)

    def payload_chunks(self) -> int:
        return len(self.passes.parts)

    def planned_bytes(self) -> float:
        selections = self.passes.layout.wire_bytes(self.options.density, self.options.selection)
        return self.payload_exchange.planned_bytes() + self.collectives.gathered_bytes(selections)

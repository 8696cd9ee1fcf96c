"""The base classes of methods: `GradientMethod` and its subclasses synchronize gradients, `LocalMethod` weights.

Their parts are the gradient norm, clipping, and an optimizer step that the device can skip.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.consistency import ReplicatedTensors
from torchtitan_scape.core.parameters import Shard, check_contiguous, store_gradient, stored
from torchtitan_scape.core.tensors import PART, flat
from torchtitan_scape.methods.interface import ErrorFeedback, Method, MethodContext, State, StepInfo, clip_factor
from torchtitan_scape.methods.overlap import EarlyExchange
from torchtitan_scape.optimizers.pytorch import AdamWPass
from torchtitan_scape.topology.chunks import double_buffered
from torchtitan_scape.topology.partition import chunks_of
from torchtitan_scape.topology.stages import Codec


class OptimizerStep:
    """The step of an optimizer on gradients times a factor, which the device can skip.

    A kernel multiplies the gradients as it reads them, if it has the optimizer's rule. Otherwise they are multiplied in
    place before, also for pre-hooks of the step, which see them; those of parameters in FP16 as well, whose range a
    gradient before clipping may exceed.

    Args:
        optimizer: The optimizer.
        backend: "triton" or "torch".
        multiply: Multiplies tensors in place by a factor on their device, see `kernels.backends.scaling`.

    Attributes:
        may_multiply: Whether a kernel may multiply, so that the stored gradients do not change. A method that reads
            them after the step sets it to False.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, backend: str, multiply: Callable[[list[Tensor], Tensor], None]
    ) -> None:
        self._optimizer, self._multiply = optimizer, multiply
        dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
        self.may_multiply = backend == "triton" and torch.float16 not in dtypes
        self._adamw = AdamWPass(optimizer, backend) if self.may_multiply else None

    def __call__(
        self, shards: Sequence[Shard], gradients: list[Tensor], applied: Tensor, factor: Tensor | None = None
    ) -> None:
        """Take the step if `applied`, bool () on the device.

        Args:
            shards: Parameters that receive their gradients here; those of others are unchanged.
            gradients: FP32, of the shards; they may be overwritten.
            factor: FP32 (); None for 1.
        """
        optimizer = self._optimizer
        adamw = self._adamw if self._adamw is not None and self._adamw.has_rule() else None
        multiplies = self.may_multiply and (adamw is not None or hasattr(optimizer, "gradient_factor"))
        multiplies = multiplies and not optimizer._optimizer_step_pre_hooks
        if factor is not None and not multiplies:
            self._multiply(gradients, factor)
            factor = None
        for shard, gradient in zip(shards, gradients, strict=True):
            store_gradient(shard, gradient)
        if adamw is not None:
            adamw.step(applied, factor)
        elif multiplies:
            optimizer.gradient_factor = factor  # type: ignore[attr-defined]
            try:
                self._step(applied)
            finally:
                optimizer.gradient_factor = None  # type: ignore[attr-defined]
        else:
            self._step(applied)

    def _step(self, applied: Tensor) -> None:
        optimizer = self._optimizer
        if getattr(optimizer, "_step_supports_amp_scaling", False) and not _creates_momentum(optimizer):
            # Fused optimizers skip the step on the device if `found_inf` is set, as for `torch.amp.GradScaler`.
            optimizer.found_inf = (~applied).float()  # type: ignore[union-attr]
            optimizer.step()
        elif applied.item():
            optimizer.step()


def _creates_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this step creates momentum buffers: fused SGD leaves them uninitialized if it skips the step."""
    return any(
        parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group.get("momentum")
        for parameter in group["params"]
    )


@contextmanager
def scaled_for_steps(optimizer: torch.optim.Optimizer, steps: int) -> Iterator[None]:
    """Scale the rates so that one step of the optimizer, with the mean of several gradients, replaces as many steps.

    Learning rates are multiplied by `steps`, and `betas` raised to that power. With AdamW equal gradients then have the
    same effect as in these steps; with AdamS and momentum about the same, once the moments have settled. SGD adds
    gradients up in its momentum, which receives the sum of those in the steps. Rates with other names stay.
    """
    groups = optimizer.param_groups if steps > 1 else []
    keys = ("lr", "betas", "momentum", "dampening")
    kept = [{key: group[key] for key in keys if key in group} for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * steps
        if "betas" in group:
            group["betas"] = tuple(beta**steps for beta in group["betas"])
        elif momentum := group.get("momentum"):
            group["momentum"] = momentum**steps
            group["dampening"] = 1.0 - (1.0 - group["dampening"]) * sum(momentum**i for i in range(steps))
    try:
        yield
    finally:
        for group, values in zip(groups, kept, strict=True):
            group.update(values)


class GradientMethod(Method):
    """A method that synchronizes gradients: synchronize -> norm -> clip -> optimizer.step -> after_optimizer_step.

    Replicas that one process simulates share one set of weights. Only one of them (`collectives.is_writer`) clips and
    updates.

    Attributes:
        optimizer_step: Takes the optimizer's step.
    """

    def __init__(self, context: MethodContext, options: Any) -> None:
        super().__init__(context, options)
        self.optimizer_step = OptimizerStep(context.optimizer, self.backend, self.multiply_gradients)

    def step(self, gradients: list[Tensor], info: StepInfo) -> None:
        context, phase = self.context, self.context.timer.phase
        with phase("exchange"):
            gradients = self.synchronize(gradients, info)
        if self.collectives.is_writer:
            self._observe(gradients, info)
            with phase("clip"):
                factor = self.set_norm(self.norm_over_model(self.norms(gradients)), info.applied)
            info = info._replace(applied=info.applied & context.grad_norm.isfinite())
            with phase("update"):
                self.optimizer_step(context.shards, gradients, info.applied, factor)
        with phase("exchange"):
            self.after_optimizer_step(info)

    @abstractmethod
    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        """Return the synchronized gradients, FP32, bitwise equal on all replicas. Collective.

        Args:
            gradients: This replica's gradients, FP32, contiguous and of any shape, one per shard; they may be
                overwritten. `core.tensors.flat` returns vectors.
            info: see `Method.step`.
        """

    def start(self, gradients: list[Tensor], info: StepInfo) -> Callable[[], list[Tensor]]:
        """Start an exchange; the returned function waits for it and returns the result of `synchronize`. Collective.

        Other collectives may run in between, and the gradients must not be changed. By default the exchange starts when
        the returned function is called.
        """
        return lambda: self.synchronize(gradients, info)

    def after_optimizer_step(self, info: StepInfo) -> None:
        """Run after the optimizer's update, for example to select the next mask. Collective."""

    def scale_to_mean(self, gradients: list[Tensor]) -> None:
        """Multiply by `context.gradient_scale`, in place."""
        if gradients and self.context.gradient_scale != 1.0:
            torch._foreach_mul_(gradients, self.context.gradient_scale)

    def scale_and_add(self, gradients: list[Tensor], residuals: list[Tensor]) -> None:
        """Replace each gradient by `context.gradient_scale` times itself plus its residual, in one pass over both."""
        if self.context.gradient_scale == 1.0:
            if gradients:
                torch._foreach_add_(gradients, residuals)
            return
        for gradient, residual in zip(gradients, residuals, strict=True):
            torch.add(residual, gradient, alpha=self.context.gradient_scale, out=gradient)


class ResidualMethod(GradientMethod):
    """Compresses the parameters of several dimensions, or all, and keeps what it does not send of them as a residual.

    Attributes:
        sparse: Numbers of the compressed shards that are not empty.
        uncompressed: Numbers of the other shards.
        pending: The residuals, also of empty shards: a checkpoint needs the states of all ranks.
        residuals: Those of `sparse`, FP32 (n,).
    """

    def __init__(self, context: MethodContext, options: Any, compresses_vectors: bool = False) -> None:
        super().__init__(context, options)
        compressed = [s.parameter.ndim > 1 or compresses_vectors for s in context.shards]
        self.sparse = [i for i, s in enumerate(context.shards) if compressed[i] and s.size]
        self.uncompressed = [i for i in range(len(context.shards)) if i not in self.sparse]
        self.pending = ErrorFeedback.of([s for s, each in zip(context.shards, compressed, strict=True) if each])
        self.residuals = [self.pending.tensors[context.shards[i].name].view(-1) for i in self.sparse]

    def exchange_all(self, gradients: list[Tensor], info: StepInfo, decay: float = 1.0) -> list[Tensor]:
        """Return the means of gradients plus `decay` times the residuals, which become zero. Collective."""
        self.scale_to_mean(gradients)
        values = flat(gradients)
        if self.sparse:
            torch._foreach_add_([values[i] for i in self.sparse], self.residuals, alpha=decay)
        self.collectives.all_reduce_chunked(values)
        self.pending.clear(info.applied)
        return gradients

    def states(self) -> list[State]:
        return [self.pending.state()]


class ChunkedMethod(GradientMethod, EarlyExchange):
    """Exchanges the gradients in chunks that do not depend on each other, starting with the last parameter.

    The boundaries of the chunks follow from the shapes, and the exchange of a chunk uses only its own gradients and
    state. The result therefore has the same bits whenever a chunk is started, provided that all replicas start the
    chunks in the same order. This allows starting them during the backward pass (`[sync] overlap`, see
    `methods.overlap`).
    """

    def __init__(
        self, context: MethodContext, options: Any, codec: Codec | None = None, in_place: bool = False
    ) -> None:
        """Divide the gradients into chunks.

        Args:
            codec: Encoding of the messages. Every parameter starts at a multiple of its block size, so that no two
                parameters share a scale.
            in_place: The gradients are encoded without a buffer.
        """
        super().__init__(context, options)
        sizes = [shard.size for shard in context.shards]
        limit = self.collectives.chunk_limit(sum(sizes), codec, in_place)
        self.chunks = chunks_of(sizes, limit, codec.block_size if codec else 1)

    def synchronize(self, gradients: list[Tensor], info: StepInfo) -> list[Tensor]:
        """Exchange the chunks, two at once: one is filled while the other is in flight.

        If the backward pass has already started chunks, only wait for them.
        """
        if self.overlap is not None and self.overlap.active:
            return self.overlap.finish(info)
        chunks = self.start_chunks(gradients, info.applied)
        double_buffered((sent.handle, partial(self.finish_chunk, sent, info.applied)) for sent in chunks)
        return gradients

    def start(self, gradients: list[Tensor], info: StepInfo) -> Callable[[], list[Tensor]]:
        """Start all chunks at once, each with its own buffer."""
        return partial(self._finish, list(self.start_chunks(gradients, info.applied)), gradients, info.applied)

    def _finish(self, chunks: Sequence[Any], gradients: list[Tensor], applied: Tensor) -> list[Tensor]:
        for sent in chunks:
            sent.handle.wait()
            self.finish_chunk(sent, applied)
        return gradients

    def begin(self) -> None:
        """Prepare a step. Called before its first chunk starts."""

    def bind(self, gradients: Sequence[Tensor | None]) -> None:
        """Prepare `start_chunk` for these gradients: those that exist now, None for the others."""

    def start_chunks(self, gradients: list[Tensor], applied: Tensor) -> Iterator[Any]:
        """Start the exchange of each chunk when the iterator comes to it. Collective."""
        self.begin()
        self.bind(gradients)
        return (self.start_chunk(number, gradients, applied) for number in range(len(self.chunks)))

    @abstractmethod
    def start_chunk(self, number: int, gradients: Sequence[Tensor | None], applied: Tensor | None) -> Any:
        """Start the exchange of a chunk, and return an object with its `handle`. Collective.

        Args:
            gradients: As in the last `bind`; those of the chunk exist.
            applied: `StepInfo.applied`; None during the backward pass, before the check for non-finite gradients.
        """

    @abstractmethod
    def finish_chunk(self, sent: Any, applied: Tensor) -> None:
        """Store the result of a chunk, after waiting for its handle, and the method's state if `applied`, bool ()."""

    def early_chunks(self) -> Sequence[Collection[int]]:
        return [{s.tensor for s in chunk.slices} for chunk in self.chunks]

    def begin_early(self, step: int) -> Collection[int]:
        self.begin()
        return range(len(self.chunks))

    def start_early(self, number: int, gradients: Sequence[Tensor | None]) -> Any:
        self.bind(gradients)
        return self.start_chunk(number, gradients, applied=None)

    def finish_early(self, sent: Any, info: StepInfo) -> None:
        self.finish_chunk(sent, info.applied)


class LocalMethod(Method):
    """A method with local updates between exchanges: norm -> clip -> optimizer.step -> exchange.

    Every replica clips its own gradient and updates its own weights with its own optimizer.
    """

    limits_gradients = False  # each replica clips by its own norm before anything is kept or sent

    def __init__(self, context: MethodContext, options: Any) -> None:
        check_contiguous(context.shards, options.method_name())
        super().__init__(context, options)
        self.optimizer_step = OptimizerStep(context.optimizer, self.backend, self.multiply_gradients)

    def step(self, gradients: list[Tensor], info: StepInfo) -> None:
        context, phase = self.context, self.context.timer.phase
        with phase("clip"):
            scale = context.gradient_scale
            norms = self.norms(gradients) if info.norms is None else info.norms
            norm = self.norm_over_model(norms) * scale
            if scale != 1.0 and (context.max_norm is None or self.observer is not None):
                torch._foreach_mul_(gradients, scale)
                scale = 1.0  # otherwise it is part of clipping, so that the gradients are read once
            self._observe(gradients, info)
            factor = None if context.max_norm is None else clip_factor(norm, context.max_norm)
            if factor is not None:
                context.clip_factor.copy_(factor)
                factor = factor * scale
            context.grad_norm.copy_(torch.where(info.applied, norm, torch.nan))
        with phase("update"):
            self.optimizer_step(context.shards, gradients, info.applied, factor)
        with phase("exchange"):
            self.exchange(info)

    @abstractmethod
    def exchange(self, info: StepInfo) -> None:
        """Exchange weights or displacements, if an exchange is due in this step. Collective."""

    @cached_property
    def _idle_states(self) -> list[State]:
        return self.states()

    def declared_states(self) -> list[State]:
        """Return the states while no exchange is running. Call it once before the first step."""
        return self._idle_states

    def model_state(self) -> State:
        """Return the state with the weights that are validated, exported and saved as the model.

        If it is per replica, the model is the mean over replicas.
        """
        return next(state for state in self.declared_states() if state.on_migration == "model")

    def anchors(self) -> dict[str, Tensor]:
        """Return the tensors of `model_state`, by name."""
        return self.model_state().tensors

    def replicated_tensors(self) -> list[ReplicatedTensors]:
        shared = [state for state in self.states() if not state.per_replica and state.by_parameter]
        return [
            ReplicatedTensors(
                s.name, [(state.kind, state.tensors[s.name]) for state in shared if s.name in state.tensors]
            )
            for s in self.context.shards
        ]

    def metrics(self, local: bool = False) -> dict[str, float]:
        """Return "density" and "residual_norm", the distance between this replica's weights and `anchors`."""
        anchors = self.anchors()
        pending = [state.tensors for state in self.declared_states() if state.on_migration == "displacement"]
        squares = torch.zeros((), dtype=torch.float64, device=self.context.grad_norm.device)
        for shard in (shard for shard in self.context.shards if shard.counted):
            others = [tensors[shard.name] for tensors in pending if shard.name in tensors]
            flat = [t.reshape(-1) for t in (stored(shard.parameter), anchors[shard.name], *others)]
            for weight, anchor, *rest in zip(*(t.split(PART) for t in flat), strict=True):  # a part at a time in FP64
                distance = anchor.to(weight.device) - weight.double()
                for other in rest:
                    distance += other.to(weight.device)
                squares += distance.square().sum()
        return {"density": self.density(), "residual_norm": self.root_mean_square(squares, local)}

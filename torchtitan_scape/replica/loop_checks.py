"""Warnings about training loops around `replicate`: mistakes that change the result and raise no error."""

import logging
from typing import Any
from weakref import ReferenceType, ref

import torch.distributed as dist
from torch import Tensor

from torchtitan_scape.core.parameters import local

logger = logging.getLogger(__name__)

# A gradient and its version, which every change in place increments.
_Seen = tuple[ReferenceType[Tensor], int]


class LoopChecks:
    """Warns once about each mistake in a loop that a step can notice without reading a gradient, on the first rank.

    It follows the gradient of one parameter, the last one, because every model uses its output.

    Args:
        optimizer: a `ReplicaOptimizer` of a single replica per process.
    """

    def __init__(self, optimizer: Any) -> None:
        self._shards, self._is_first, self._warned = optimizer.shards(), True, set[str]()
        trained = [shard.parameter for shard in self._shards if shard.parameter.requires_grad]
        self._after_backward: _Seen | None = None
        self._after_step: _Seen | None = None
        if trained and (dist.get_rank() if dist.is_initialized() else 0) == 0:
            self._parameter: Tensor = trained[-1]
            self._parameter.register_post_accumulate_grad_hook(self._on_backward)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._on_step)

    def _on_backward(self, parameter: Tensor) -> None:
        if self._changes_since(self._after_step) == 1:  # the accumulation alone; `zero_` would be another change
            self._warn(
                "the gradients of the last step were not cleared before this backward pass, which adds to them; call "
                "optimizer.zero_grad() after step(), which uses their storage as scratch space"
            )
        self._after_step, self._after_backward = None, self._seen()

    def _before_step(self, *_: Any) -> None:
        if self._changes_since(self._after_backward):
            self._warn(
                "the gradients were changed between the backward pass and step(), where they are those of one replica; "
                "if clip_grad_norm_() does it, remove it and pass max_norm to replicate(), which clips by the "
                "synchronized norm"
            )
        missing = [shard.name for shard in self._shards if shard.parameter.grad is None] if self._is_first else []
        if missing and self._after_backward is not None:  # else a closure runs the backward pass later
            self._warn(
                f"{len(missing)} parameters have no gradient, first {missing[0]!r}; step() treats it as zero, so that "
                "momentum and weight decay change them, where PyTorch's optimizers skip them. Do not pass parameters "
                "that are never used to the optimizer"
            )
        self._is_first = False

    def _on_step(self, *_: Any) -> None:
        self._after_backward, self._after_step = None, self._seen()

    def _seen(self) -> _Seen | None:
        gradient = self._parameter.grad
        return None if gradient is None else (ref(gradient), local(gradient)._version)

    def _changes_since(self, seen: _Seen | None) -> int:
        """Return how often the gradient was changed since then; 0 if it is another tensor."""
        gradient = self._parameter.grad
        if gradient is None or seen is None or seen[0]() is not gradient:
            return 0
        return local(gradient)._version - seen[1]

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

"""Checks of training loops around `replicate`: mistakes that raise no error, and calls that need all ranks."""

import logging
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from torchtitan_scape.core.parameters import Shard, local
from torchtitan_scape.topology.collectives import ReplicaCollectives

logger = logging.getLogger(__name__)

SECONDS = 300.0  # the first rank waits so long for the others, which may be late
WARNING_SECONDS = 10.0  # after which it says that it waits
_CALLS: Counter[str] = Counter()  # of this process, by ranks and name

# A gradient and its version, which every change in place increments. That of a DTensor excludes what FSDP2 adds to its
# local tensor.
_Seen = tuple[ReferenceType[Tensor], int]


class LoopChecks:
    """Warns once about each mistake in a loop that a step can notice, on the first rank.

    It follows the gradient of one parameter, the first that receives one. With DTensors it notices fewer mistakes:
    FSDP2 runs no hook before it accumulates, and foreach functions, as in `clip_grad_norm_`, keep their version.

    Args:
        optimizer: a `ReplicaOptimizer` of a single replica per process.
        shards: its parameters.
    """

    def __init__(self, optimizer: Optimizer, shards: Sequence[Shard]) -> None:
        self._shards, self._is_first, self._warned = shards, True, set[str]()
        self._parameter: Tensor | None = None
        self._after_backward: _Seen | None = None
        self._after_step: _Seen | None = None
        self._left: Tensor | None = None  # whether the backward pass adds to values that are not zero
        self._may_read = True
        if (dist.get_rank() if dist.is_initialized() else 0) == 0:
            trained = [shard.parameter for shard in self._shards if shard.parameter.requires_grad]
            self._hooks = [(p, p.register_post_accumulate_grad_hook(self._on_backward)) for p in trained]
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._on_step)

    def _follow(self, parameter: Tensor) -> None:
        """Follow this parameter, and remove the hooks of the others."""
        self._parameter = parameter
        for other, hook in self._hooks:
            if other is not parameter:
                hook.remove()
        self._hooks = []
        parameter.register_hook(self._before_accumulation)

    def _before_accumulation(self, _: Tensor) -> None:
        """Compute whether an unchanged gradient of the last step has values. `torch.autograd.grad` calls this, too."""
        # Writes to `grad.data` do not change the version, so that the values are needed; they are read once in a run.
        is_left = self._may_read and self._changes_since(self._after_step) == 0
        self._left = local(self._parameter.grad).any() if is_left else None  # type: ignore[union-attr, arg-type]

    def _on_backward(self, parameter: Tensor) -> None:
        if self._parameter is None:
            self._follow(parameter)
        if self._left is not None:
            self._may_read = False
            if self._left.item():
                self._warn(
                    "the gradients of the last step were not cleared before this backward pass, which adds to them; "
                    "call optimizer.zero_grad() after step(), which uses their storage as scratch space"
                )
        self._left, self._after_step, self._after_backward = None, None, self._seen()

    def _before_step(self, *_: Any) -> None:
        if self._changes_since(self._after_backward):
            self._warn(
                "the gradients were changed between the backward pass and step(), where they are those of one replica; "
                "that is right only for a change that is the same on all replicas, such as a constant factor. If "
                "clip_grad_norm_() does it, remove it and pass max_norm to replicate(), which clips by the "
                "synchronized norm"
            )
        missing = [shard.name for shard in self._shards if shard.parameter.grad is None] if self._is_first else []
        if 0 < len(missing) < len(self._shards):  # without any, a closure runs the backward pass later
            self._warn(
                f"{len(missing)} parameters have no gradient, first {missing[0]!r}; step() treats it as zero, so that "
                "momentum and weight decay change them, where PyTorch's optimizers skip them. Do not pass parameters "
                "that are never used to the optimizer"
            )
        self._is_first = False

    def _on_step(self, *_: Any) -> None:
        self._after_backward, self._after_step = None, self._seen()

    def _seen(self) -> _Seen | None:
        gradient = None if self._parameter is None else self._parameter.grad
        return None if gradient is None else (ref(gradient), gradient._version)

    def _changes_since(self, seen: _Seen | None) -> int | None:
        """Return how often the gradient was changed since then; None if it is another tensor, or there is none."""
        before = None if seen is None else seen[0]()
        if self._parameter is None or seen is None or before is None or self._parameter.grad is not before:
            return None
        return before._version - seen[1]

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


class JointCalls:
    """Notices a call of some ranks only, such as `if rank == 0: torch.save(optimizer.state_dict(), ...)`.

    Such a call would save the state of these ranks alone, or wait for the others until the group's timeout. The first
    rank waits on the host until all others have made the same call, and raises an error if they do not. The others do
    not wait, because the first one may be late: it often evaluates or writes alone before. Calls that load are not
    checked, because the ranks may have read files of different sizes before.

    Construction is collective.
    """

    def __init__(self, collectives: ReplicaCollectives) -> None:
        self._ranks: list[int] = []
        if dist.is_initialized() and not collectives.is_fake:
            self._ranks = sorted(set(collectives.gather_objects(dist.get_rank())))

    def expect(self, call: str, advice: str = "call it on every rank") -> None:
        """Check that all ranks make this call. It returns at once on all ranks but the first.

        Args:
            call: name of the function for the message.
            advice: the end of the message.

        Raises:
            ValueError: on the first rank, after `SECONDS` without the call of another one.
        """
        if len(self._ranks) < 2:
            return
        store = dist.distributed_c10d._get_default_store()
        key = f"torchtitan_scape/{zlib.crc32(repr(self._ranks).encode())}/{call}"
        numbered = f"{key}/{_CALLS[key]}"
        _CALLS[key] += 1
        arrived = store.add(numbered, 1)
        if dist.get_rank() != self._ranks[0]:
            return
        begin, warned = time.monotonic(), False
        while arrived < len(self._ranks) and (waited := time.monotonic() - begin) < SECONDS:
            if waited > WARNING_SECONDS and not warned:
                warned = True
                logger.warning(
                    f"{call}() was called on {arrived} of {len(self._ranks)} ranks; rank {self._ranks[0]} waits for "
                    f"the others, {SECONDS:.0f} s at most: {advice}"
                )
            time.sleep(0.005)
            arrived = store.add(numbered, 0)
        store.delete_key(numbered)
        if arrived < len(self._ranks):
            _CALLS[key] -= 1  # the others have not counted it
            raise ValueError(
                f"{call}() was called on {arrived} of {len(self._ranks)} ranks within {SECONDS:.0f} s, rank "
                f"{self._ranks[0]} among them; {advice}"
            )

"""Chunks of gradients that go out while the backward pass that leaves them is still running."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import Shard, flat_gradient
from torchtitan_scape.methods.chunked import ChunkedMethod, ChunkInFlight
from torchtitan_scape.methods.interface import Method, StepInfo


class BackwardOverlap:
    """Starts the chunks of a method as the last backward pass of a step completes their gradients.

    A gradient is complete when its parameter's post-accumulate hook runs: autograd's, or FSDP2's after its
    reduce-scatter, which accumulates on the shard itself. All replicas start all chunks of a step in the same order,
    whatever order their gradients come in: a chunk waits for those in front of it, and what is left, of parameters
    without a gradient too, is started in `start_remaining`, before any other collective. Chunks that were not
    complete on some rank come last in the next step, so that a parameter that is not used holds up its own alone.
    Gradients stay as they are meanwhile, for the check whether they are finite, and the method's state, which is
    written after it, in `take`.

    Usage, a step: `begin`, the backward pass, `start_remaining`, `take`.
    """

    def __init__(self, method: ChunkedMethod, shards: Sequence[Shard]) -> None:
        self._method, self._shards = method, shards
        self._needed = [{s.tensor for s in chunk.slices} for chunk in method.chunks]
        self._gradients: dict[int, Tensor] = {}
        self._arriving: list[ChunkInFlight] = []
        self._order = list(range(len(self._needed)))
        self.complete: list[
            bool
        ] = []  # of every chunk, once `start_remaining` was called: whether the backward pass completed it
        self.under_way = False
        for number, shard in enumerate(shards):
            shard.parameter.register_post_accumulate_grad_hook(partial(self._left, number))

    @classmethod
    def of(cls, methods: Sequence[Method], shards: Sequence[Shard]) -> "BackwardOverlap | None":
        """methods: of the replicas of a process. None where there is nobody to send to, or no backward pass of one
        replica alone."""
        first = methods[0]
        if isinstance(first, ChunkedMethod) and len(methods) == 1 and first.collectives.replicas > 1:
            return cls(first, shards)
        return None

    def begin(self, agreed: Sequence[bool] = ()) -> None:
        """The next backward pass is the last of its step. agreed: what of `complete` all ranks had in the last one."""
        assert not self.under_way, "after a backward pass that failed call zero_grad() first"
        self._method.begin()
        if len(agreed) == len(self._order):
            self._order = sorted(range(len(agreed)), key=lambda number: not agreed[number])
        self._gradients, self._arriving, self.under_way = {}, [], True

    def cancel(self) -> bool:
        """Ends what a backward pass that failed has begun, and whose step did not follow; whether there was one.

        The other replicas give it up as well, but may have come further: all chunks are exchanged, and nothing is made
        of them.
        """
        if not self.under_way:
            return False
        self._start_rest()
        for chunk in self._arriving:
            chunk.handle.wait()
        self._gradients, self._arriving, self.under_way = {}, [], False
        return True

    def start_remaining(self) -> list[Tensor]:
        """Starts what is left. Returns the gradients as the method takes them."""
        self.complete = [needed <= self._gradients.keys() for needed in self._needed]
        return self._start_rest()

    @torch.no_grad()
    def _start_rest(self) -> list[Tensor]:
        for number, shard in enumerate(self._shards):
            if number not in self._gradients:
                self._gradients[number] = flat_gradient(shard).float()
        self._start_complete()
        return [self._gradients[number] for number in range(len(self._shards))]

    def take(self, step: StepInfo) -> list[Tensor]:
        """What `synchronize` of the method gives."""
        found = self._start_rest()
        for chunk in self._arriving:
            chunk.take(step)
        self._gradients, self._arriving, self.complete, self.under_way = {}, [], [], False
        return found

    @torch.no_grad()
    def _left(self, number: int, parameter: Tensor) -> None:
        """The backward pass has completed a parameter's gradient."""
        if not self.under_way:
            return
        if number in self._gradients:
            raise ValueError(
                f"the backward pass left a gradient of {self._shards[number].name!r} twice, as for a module that is "
                "used twice under FSDP; set [sync] overlap = false"
            )
        self._gradients[number] = flat_gradient(self._shards[number]).float()
        self._start_complete()

    def _start_complete(self) -> None:
        for number in self._order[len(self._arriving) :]:
            if not self._needed[number] <= self._gradients.keys():
                return
            self._arriving.append(self._method.start_chunk(number, self._gradients))

"""Real processes with gloo, started once a session and shared by the tests: a start takes seconds."""

import functools
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_CALLS = 30  # then new processes take over


class RankError(AssertionError):
    """A rank's exception, with its traceback as text and the exception's type name."""


class Pool:
    """`world` processes in one gloo group. A call that fails ends the pool; the next call starts a new one.

    `outcomes` spares it where all ranks have failed, as they do when they refuse something: none is left waiting.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._ranks: list[tuple[Any, Any]] = []
        self._calls = 0

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = f"{tempfile.mkdtemp()}/store"
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.world, store), daemon=True)
            process.start()
            self._calls = 0
            self._ranks.append((process, ours))

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
        """Runs `function(*args)` on every rank; the results in rank order. Raises the first rank's error."""
        outcomes = self.outcomes(function, *args, timeout=timeout, **kwargs)
        for rank, (good, value) in enumerate(outcomes):
            if not good:
                self.close()
                raise RankError(f"rank {rank}: {value}")
        return [value for _, value in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any
    ) -> list[tuple[bool, Any]]:
        """As a call, but (True, result) or (False, traceback) of every rank."""
        if not self._ranks:
            self._start()
        call = functools.partial(function, *args, **kwargs)
        for _, connection in self._ranks:
            connection.send(call)
        outcomes, answers = [], 0
        for process, connection in self._ranks:
            if not connection.poll(timeout):
                outcomes.append((False, f"no answer within {timeout} s (alive: {process.is_alive()})"))
                break
            try:
                outcomes.append(connection.recv())
                answers += 1
            except EOFError:
                outcomes.append((False, "the process died"))
        self._calls += 1
        # Every trainer leaves gloo groups, whose threads wake a hundred times a second, for as long as a process lives.
        if self._calls >= _CALLS or answers < self.world or len({good for good, _ in outcomes}) > 1:
            self.close()
        return outcomes

    def close(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []


def _serve(connection: Any, rank: int, world: int, store: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    import torch
    import torch.distributed as dist

    from torchtitan_scape import device

    torch.set_num_threads(1)
    device.prepare()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    while True:
        call = connection.recv()
        try:
            connection.send((True, call()))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        # TorchTitan turns automatic collection off: trainers, which refer to themselves, would stay until the end.
        del call
        gc.collect()

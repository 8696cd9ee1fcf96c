"""Real processes with gloo: forks of tests/server.py, new ones for every call."""

import contextlib
import functools
import os
import pickle
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from tests.server import Process


class RankError(AssertionError):
    """A rank's exception, with its traceback as text and the exception's type name."""


class Pool:
    """`world` processes in one gloo group."""

    def __init__(self, world: int) -> None:
        self.world = world

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
        """Runs `function(*args)` on every rank; the results in rank order. Raises the first rank's error."""
        outcomes = self.outcomes(function, *args, timeout=timeout, **kwargs)
        for rank, (good, value) in enumerate(outcomes):
            if not good:
                raise RankError(f"rank {rank}: {value}")
        return [value for _, value in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any
    ) -> list[tuple[bool, Any]]:
        """As a call, but (True, result) or (False, traceback) of every rank, up to one that does not answer."""
        call = pickle.dumps(functools.partial(function, *args, **kwargs))
        outcomes: list[tuple[bool, Any]] = []
        with tempfile.TemporaryDirectory() as folder:
            ranks = [_Rank(rank, self.world, f"{folder}/store") for rank in range(self.world)]
            try:
                for rank in ranks:
                    rank.connection.send_bytes(call)
                for rank in ranks:
                    if not rank.connection.poll(timeout):
                        outcomes.append((False, f"no answer within {timeout} s"))
                        break
                    try:
                        outcomes.append(pickle.loads(rank.connection.recv_bytes()))
                    except (EOFError, ConnectionResetError):
                        outcomes.append((False, "the process died"))
            finally:
                # None ends before all have answered: they may be talking to each other.
                for rank in ranks:
                    rank.connection.close()
                    rank.process.kill()
        return outcomes


def attempts(function: Callable[..., Any], *rows: tuple[Any, ...]) -> list[tuple[bool, Any]]:
    """In a rank: (True, result) or (False, traceback) of one call of `function` after the other, a row of arguments
    each. Ranks are started once for all; a call that fails must do so on all of them."""
    found: list[tuple[bool, Any]] = []
    for row in rows:
        try:
            found.append((True, function(*row)))
        except Exception:
            found.append((False, traceback.format_exc()))
    return found


class _Rank:
    def __init__(self, rank: int, world: int, store: str) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with theirs:
            self.process = Process("tests.pool", [store], environment, files=[0, 1, 2, theirs.fileno()])
        self.connection = Connection(ours.detach())


def _main(store: str) -> None:
    import torch.distributed as dist

    connection = Connection(3)
    call = pickle.loads(connection.recv_bytes())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        outcome = pickle.dumps((True, call()))
    except BaseException:
        outcome = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(outcome)
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()  # until all have answered
    os._exit(0)  # threads of groups may be waiting for each other


if __name__ == "__main__":
    _main(sys.argv[1])

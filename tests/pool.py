"""Run a function on several ranks of one gloo group. The ranks are forks of the test server, new ones for each call."""

import contextlib
import faulthandler
import functools
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.server import Process

GRACE_SECONDS = 15.0  # for the other ranks to answer after the first failure
_EXIT_SECONDS = 0.2  # the kernel closes all sockets of a killed process within this time
_STACK_SECONDS = 0.5  # a rank writes the stacks of its threads within this time
_STACK_SIGNAL = signal.SIGUSR2  # requests the stacks; the product handles SIGUSR1


class RankError(AssertionError):
    """The failure of the rank that failed first, with its traceback, and one line for each later failure."""


@dataclass(frozen=True)
class Outcome:
    """The result or the failure of one rank.

    Attributes:
        good: whether the function returned.
        value: its return value, or the text of the failure.
        seconds: time at which it returned or failed, by `time.monotonic()`, which all processes of a machine share.
    """

    good: bool
    value: Any
    seconds: float


class Pool:
    """Runs functions on `world` ranks of one gloo group.

    Args:
        world: number of ranks.
        grace: seconds that the other ranks get to answer after the first failure.
    """

    def __init__(self, world: int, grace: float = GRACE_SECONDS) -> None:
        self.world, self.grace = world, grace

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank and return the results in rank order.

        Raises:
            RankError: if a rank raises, dies, or does not answer within `timeout` seconds.
        """
        outcomes = self._run(functools.partial(function, *args, **kwargs), timeout)
        if failures := _failures_by_time(outcomes):
            raise RankError(_describe(failures))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any
    ) -> list[tuple[bool, Any]]:
        """Return (True, result) or (False, text of the failure) for every rank, in rank order."""
        outcomes = self._run(functools.partial(function, *args, **kwargs), timeout)
        return [(outcome.good, outcome.value) for outcome in outcomes]

    def _run(self, function: Callable[[], Any], timeout: float) -> list[Outcome]:
        call = pickle.dumps(function)
        with tempfile.TemporaryDirectory() as folder:
            ranks: list[_Rank] = []
            try:
                for rank in range(self.world):
                    ranks.append(_Rank(rank, self.world, folder))
                for one in ranks:
                    with contextlib.suppress(ConnectionError):  # it has died already, which `_collect` finds
                        one.connection.send_bytes(call)
                return _collect(ranks, timeout, self.grace)
            finally:
                # No rank exits before all have answered: another one may still use its connections.
                for one in ranks:
                    one.connection.close()
                    one.process.kill()


def attempts(function: Callable[..., Any], *rows: tuple[Any, ...]) -> list[tuple[bool, Any]]:
    """Call `function` once for each row of arguments, inside a rank, and return (True, result) or (False, traceback).

    One start of the ranks then serves many calls. A call that raises must raise on all ranks.
    """
    found: list[tuple[bool, Any]] = []
    for row in rows:
        try:
            found.append((True, function(*row)))
        except Exception:
            found.append((False, traceback.format_exc()))
    return found


def _collect(ranks: "list[_Rank]", timeout: float, grace: float) -> list[Outcome]:
    """Return the outcome of each rank, read in the order in which the ranks answer.

    A process that dies cannot report when, and the error that its death causes on another rank may be read first.
    The death is therefore dated back to the last time at which the connection was seen open, and the connections are
    read again some time after a failure, when those of a dying process are closed for certain.
    """
    found: dict[int, Outcome] = {}
    seen_open = time.monotonic()
    deadline, reason = seen_open + timeout, f"no answer within {timeout:g} s"
    failed = False
    while waiting := {rank.connection: rank for rank in ranks if rank.number not in found}:
        if not (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            stacks = _stacks(list(waiting.values()))
            return [found.get(rank.number) or Outcome(False, reason + stacks[rank.number], deadline) for rank in ranks]
        answers = {waiting[connection].number: waiting[connection].receive(seen_open) for connection in ready}  # type: ignore[index]
        now = time.monotonic()
        if not all(answer.good for answer in answers.values()):
            time.sleep(_EXIT_SECONDS)
            now = time.monotonic()
            late = [waiting[c] for c in wait(list(waiting), 0) if waiting[c].number not in answers]  # type: ignore[index]
            answers |= {rank.number: rank.receive(seen_open) for rank in late}
            if not failed:
                failed, deadline = True, min(deadline, now + grace)
                reason = f"no answer within {grace:g} s after the first failure"
        found |= answers
        seen_open = now
    return [found[rank.number] for rank in ranks]


def _failures_by_time(outcomes: list[Outcome]) -> list[tuple[int, Outcome]]:
    failures = [(rank, outcome) for rank, outcome in enumerate(outcomes) if not outcome.good]
    return sorted(failures, key=lambda failure: failure[1].seconds)


def _describe(failures: list[tuple[int, Outcome]]) -> str:
    """Return the text of the first failure, of those at the same time, and one line for each later one."""
    begin = failures[0][1].seconds
    texts = []
    for rank, outcome in failures:
        text, later = outcome.value.strip(), outcome.seconds - begin
        if later > 0:
            line = text.splitlines()[-1 if text.startswith("Traceback") else 0]
            text = f"[failed {later:.3f} s later] {line}"
        texts.append(f"rank {rank}: {text}")
    return "\n".join(texts)


class _Rank:
    """The process of one rank, and the connection over which it gets its call and returns its outcome."""

    def __init__(self, number: int, world: int, folder: str) -> None:
        self.number, self.stack_file = number, Path(folder, f"stacks-{number}")
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with theirs:
            arguments = [f"{folder}/store", str(self.stack_file)]
            self.process = Process("tests.pool", arguments, environment, files=[0, 1, 2, theirs.fileno()])
        self.connection = Connection(ours.detach())

    def receive(self, seen_open: float) -> Outcome:
        """Return the outcome that the process has sent. If it died instead, date the failure to `seen_open`."""
        try:
            return Outcome(*pickle.loads(self.connection.recv_bytes()))
        except (EOFError, ConnectionResetError):
            return Outcome(False, f"the process died ({self._end()}){self.stacks()}", seen_open)

    def stacks(self) -> str:
        """Return the Python stacks of the rank's threads, if a fatal signal or `_stacks` had them written."""
        text = self.stack_file.read_text() if self.stack_file.exists() else ""
        return f"; its stacks:\n{text}" if text else ""

    def _end(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except TimeoutError:
            return "its connection is closed, and it still runs"
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _stacks(ranks: list[_Rank]) -> dict[int, str]:
    """Have each rank write the Python stacks of its threads, and return them as text."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, _STACK_SIGNAL)
    time.sleep(_STACK_SECONDS)
    return {rank.number: rank.stacks() for rank in ranks}


def _main(store: str, stack_file: str) -> None:
    """Run the call that the pool sends, in a process of its own."""
    import torch.distributed as dist

    connection = Connection(3)
    stacks = open(stack_file, "w")  # noqa: SIM115  open as long as the process
    faulthandler.enable(stacks)
    faulthandler.register(_STACK_SIGNAL, stacks)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        call = pickle.loads(connection.recv_bytes())
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        outcome = pickle.dumps((True, call(), time.monotonic()))
    except BaseException:
        outcome = pickle.dumps((False, traceback.format_exc(), time.monotonic()))
    connection.send_bytes(outcome)
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()  # returns when the pool has the outcomes of all ranks
    os._exit(0)  # without joining threads of process groups, which may wait for each other


if __name__ == "__main__":
    _main(*sys.argv[1:])

"""Which ranks are alive: heartbeats over the launcher's store, so that a rank that is lost is named, and soon.

Every rank counts up a beat of its own, watches its successor's, and looks for one key that says what ended the run:
three small requests a rank and interval, however many ranks there are. Who finds something wrong writes that key,
and the first to write decides what all the others print and which exit code they take.

Two threads: one talks to the store, and may hang with it; the other one judges by the clock, and ends the process
where the main thread waits for another rank and cannot: in a collective of NCCL, or on a stream.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

WRONG_INPUT, LOST, NOT_SAVED, STOPPED = 2, 3, 4, 75
"""Exit codes: starting again is no use; a rank was lost or something broke; stopped on request with nothing saved, or
with a checkpoint: start again."""

INTERVAL_SECONDS = 1.0
SILENT_INTERVALS = 5  # without a beat, once something is known to be wrong: then a rank counts as lost
REACT_SECONDS = 5.0  # that the main thread has to end by itself, once all know why
_LEFT = 1 << 40  # a beat of a rank that has ended as it should
_SEARCHERS = 3  # ranks that look at everybody when something is wrong; the others wait for what they find


@dataclass(frozen=True)
class Failure:
    """What ended the run, in one line, and the exit code that all ranks take."""

    rank: int
    code: int
    text: str


class Liveness:
    """This rank's heartbeats and what it knows of the others. See `join`.

    Args:
        connect: gives the store; called in the thread that talks to it. None for a rank alone: nobody is told
            anything, and nobody is lost.
        place: where the store is, for messages: "rank 0's host ADDRESS".
        hosts: whether the store is this process's, so that it must outlive what is written last.

    Attributes:
        hint: what a new start will do, for the line that ends a run; called once.
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store] | None,
        rank: int,
        world: int = 1,
        place: str = "",
        hosts: bool = False,
    ) -> None:
        self.rank, self.world, self._place, self._hosts = rank, world, place, hosts
        self.hint: Callable[[], str] = str
        self._connect, self._alone = connect, connect is None
        # With thousands of ranks the store answers about three thousand requests a second.
        self._interval = max(INTERVAL_SECONDS, world / 1000)
        self._silent = SILENT_INTERVALS * self._interval
        self._limit = 300.0
        self._progress = self._answered = time.monotonic()
        self._beats: dict[int, tuple[int, float]] = {}  # of others: count, and when it was first seen
        self._names: dict[int, str] = {}
        self._failure: Failure | None = None
        self._to_tell: Failure | None = None
        self._told, self._leaving, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._speaker = threading.Lock()  # for good with the thread that says why this rank ends
        self._alarmed = self._suspicious = self._searching = False
        self._gone: float | None = None  # when the store was found to be gone
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._talk, "heartbeats"), (self._judge, "liveness"))
        ]
        for thread in () if self._alone else self._threads:
            thread.start()

    @classmethod
    def join(cls, environment: Mapping[str, str]) -> "Liveness":
        """This rank's; alone where there is one rank, or no store to meet at."""
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if any(not environment.get(name) for name in needed) or environment["WORLD_SIZE"] == "1":
            return cls(None, int(environment.get("RANK") or 0))
        rank, world, address = int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment["MASTER_ADDR"]
        # torchrun's agent has a store; without one rank 0 makes it, and init_process_group will share it.
        hosts = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = _store(environment, is_master=True) if hosts else None
        return cls(lambda: store or _store(environment), rank, world, f"{address}:{environment['MASTER_PORT']}", hosts)

    # ------------------------------------------------------------------------------ for the main thread

    def expect(self, timeout: float) -> None:
        """From now on collectives wait for `timeout` seconds; who is silent for nearly as long is lost."""
        self._limit = max(timeout - 5.0, 0.8 * timeout)
        self._progress = time.monotonic()

    def progressed(self) -> None:
        """The main thread got somewhere: silence of others is none of its business until it waits again."""
        self._progress = time.monotonic()

    @property
    def failure(self) -> Failure | None:
        """What ended the run, as far as this rank has heard."""
        return self._failure

    def tell(self, failure: Failure, patience: float | None = None) -> None:
        """Lets the others know why this rank ends; waits until it is written, for `patience` or a few seconds."""
        if self._alone:
            return
        self._to_tell = self._to_tell or failure
        self._wake.set()
        if patience is None:
            answers = time.monotonic() - self._answered < 2 * self._interval
            patience = self._silent if answers else self._interval
        if self._told.wait(patience) and self._hosts:
            time.sleep(2 * self._interval)  # for all to read it

    def explain(self) -> Failure | None:
        """Who made a collective of this rank fail; None if all others are alive. Takes up to ten intervals."""
        if self._alone:
            return None
        self._alarmed = True
        self._wake.set()
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < 2 * self._silent:
            # Not at once: after a halt of this process itself, all that it knows is old.
            found = self._found(self._silent) if waited > 2 * self._interval else None
            if failure := self._failure or found:
                self.tell(failure)
                return self._failure or failure
            time.sleep(0.1)
        return None

    def leave(self) -> None:
        """This rank has ended as it should, and its silence means nothing."""
        self._leaving.set()
        self._wake.set()
        if not self._alone:
            self._threads[0].join(2.0)

    def end(self, failure: Failure) -> NoReturn:
        """Says why, if this rank has not said it yet, and ends the process at once."""
        self.say(f"{failure.text}{self.hinted()}")
        sys.stdout.flush()
        os._exit(failure.code)

    def say(self, message: str) -> None:
        """The one line that this rank ends with."""
        if self._speaker.acquire(blocking=False):
            say(self.rank, message)

    def hinted(self) -> str:
        """What a new start will do. It looks into a folder, whose file system may be what is broken."""
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(self.hint()), daemon=True)
        thread.start()
        thread.join(2.0)
        return f"; {found[0]}" if found and found[0] else ""

    # -------------------------------------------------------------------------------- the store's thread

    def _talk(self) -> None:
        assert self._connect is not None
        try:
            store = self._connect()
            store.set(f"name/{self.rank}", f"{socket.gethostname()}, process {os.getpid()}")
            while not self._leaving.is_set():
                self._round(store)
                self._answered = time.monotonic()
                self._wake.wait(self._interval)
                self._wake.clear()
            self._round(store)
            store.add(f"beat/{self.rank}", _LEFT)
        except RuntimeError:  # DistNetworkError and its kin
            self._gone = time.monotonic()
            self._told.set()  # as far as it goes

    def _round(self, store: dist.Store) -> None:
        """Beats, tells, and looks. O(1) requests as long as nothing is wrong."""
        if self._to_tell is not None and not self._told.is_set():
            store.compare_set("failed", "", json.dumps(asdict(self._to_tell)))
        store.add(f"beat/{self.rank}", 1)
        if self._failure is None and store.check(["failed"]):
            self._failure = Failure(**json.loads(store.get("failed")))
            self._told.set()
        successor = (self.rank + 1) % self.world
        suspicious = self._alarmed or self._silence(successor) > self._silent
        if suspicious != self._suspicious:
            self._suspicious = suspicious
            searchers = store.add("searchers", 1 if suspicious else -1)
            self._searching = suspicious and searchers <= _SEARCHERS
        for rank in range(self.world) if self._searching else [successor]:
            if rank == self.rank:
                continue
            beat = store.add(f"beat/{rank}", 0)
            now = time.monotonic()
            if rank not in self._beats or beat != self._beats[rank][0]:
                self._beats[rank] = (beat, now)
            elif now - self._beats[rank][1] > 2 * self._interval and rank not in self._names:
                known = store.check([f"name/{rank}"])
                self._names[rank] = store.get(f"name/{rank}").decode() if known else "which has not started"

    # -------------------------------------------------------------------------------- the judge's thread

    def _judge(self) -> None:
        launcher, looked = os.getppid(), time.monotonic()
        while not self._leaving.wait(0.5):
            now, before = time.monotonic(), looked
            looked = now
            failure = self._failure
            if os.getppid() != launcher:
                failure = failure or Failure(self.rank, LOST, f"the launcher of rank {self.rank} has ended")
                self.tell(failure)
                self.end(failure)  # at once: nobody would start or stop this rank, or read what it prints
            # A process that was halted itself must hear from the others first.
            if now - before < 2 * self._interval and now - self._progress >= self._limit:
                failure = failure or self._found(self._limit)
            if failure is None:
                continue
            self.tell(failure)
            if not self._leaving.wait(max(0.0, REACT_SECONDS - (time.monotonic() - now))):
                self.end(self._failure or failure)

    def _silence(self, rank: int) -> float:
        """Seconds between a rank's last beat and the store's last answer."""
        if rank not in self._beats or self._beats[rank][0] >= _LEFT:
            return 0.0
        return self._answered - self._beats[rank][1]

    def _found(self, seconds: float) -> Failure | None:
        """The ranks, or the store, that have been silent for so long."""
        now = time.monotonic()
        if self._gone is not None:
            if now - self._gone < 2 * INTERVAL_SECONDS:
                return None  # what was written last may say more
            why = f"the store at {self._place} is gone: rank 0, its launcher or its host has ended"
            return Failure(0, LOST, why)
        if now - self._answered >= seconds:
            silent = now - self._answered
            why = f"rank 0's host, the store at {self._place}, is silent for {silent:.0f} s: it or the link is lost"
            return Failure(0, LOST, why)
        lost = [rank for rank in sorted(self._beats) if self._silence(rank) >= seconds]
        if not lost:
            return None
        longest = max(self._silence(rank) for rank in lost)
        named = ", ".join(f"rank {rank} ({self._names.get(rank, 'name unknown')})" for rank in lost[:4])
        more = f" and {len(lost) - 4} more ranks" if len(lost) > 4 else ""
        are = "is" if len(lost) == 1 else "are"
        return Failure(lost[0], LOST, f"{named}{more} {are} lost: no sign of life for {longest:.0f} s")


def _store(environment: Mapping[str, Any], is_master: bool = False, timeout: float = 300.0) -> dist.Store:
    store = dist.TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=is_master,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return dist.PrefixStore(f"scape/liveness/{environment.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def tell_for(rank: int, process: int, how: str, address: str, port: int) -> None:
    """A launcher's word on a rank of its own that cannot speak any more: the others name it at once."""
    failure = Failure(rank, LOST, f"rank {rank} ({socket.gethostname()}, process {process}) {how}")
    store = _store({"MASTER_ADDR": address, "MASTER_PORT": port}, timeout=5.0)
    store.compare_set("failed", "", json.dumps(asdict(failure)))


def failure_known(address: str, port: int) -> Callable[[], bool]:
    """Asks whether a rank has said what ended the run: for a launcher whose own rank may be halted, and deaf to it."""
    store: list[dist.Store] = []

    def known() -> bool:
        try:
            if not store:
                store.append(_store({"MASTER_ADDR": address, "MASTER_PORT": port}, timeout=5.0))
            return bool(store[0].check(["failed"]))
        except (RuntimeError, TimeoutError):  # a link that is down for a while: the ranks judge that
            return False

    return known


def say(rank: int | str, message: str) -> None:
    """The one line that a rank ends with."""
    print(f"[rank {rank}] error: {message}", file=sys.stderr, flush=True)

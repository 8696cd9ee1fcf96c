"""Liveness of ranks: heartbeats in the launcher's store, so that a lost rank is detected soon and named.

Every rank increments its own heartbeat, monitors that of its successor, and checks one key that contains the reason for
the end of the run: three small requests per rank and interval, for any number of ranks. A rank that detects a failure
writes this key. The first write determines the message and the exit code of all ranks.

There are two threads. One communicates with the store, and may block with it. The other one evaluates timeouts, and
ends the process if the main thread cannot do so because it waits for another rank, in an NCCL collective or on a
stream.
"""

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from torchtitan_scape.runtime.listening import WrongEndpointError, from_json, listen_when_free, to_json

logger = logging.getLogger(__name__)

WRONG_INPUT, LOST, NOT_SAVED, STOPPED = 2, 3, 4, 75
"""Exit codes: wrong input, a restart does not help; a rank was lost or failed; stopped on request without a checkpoint;
stopped on request with a checkpoint, run the same command again."""

INTERVAL_SECONDS = 1.0
SILENT_INTERVALS = 5  # Missed heartbeats after which a rank counts as lost, once a failure is suspected.
REACT_SECONDS = 5.0  # Time for the main thread to end by itself once the failure is known.
START_SECONDS = 300.0  # Time for rank 0 to serve the store.
_STARTED = "started"  # Key that rank 0 sets when it serves the store.
_LEFT = 1 << 40  # Heartbeat count of a rank that has ended normally.
_SEARCHERS = 3  # Number of ranks that check all heartbeats after a failure; the others wait for their result.
_INNERMOST = 3  # Frames that decide; those of the launcher are also in torch.distributed.
_COLLECTIVES = ("torch.distributed", "torchtitan_scape.topology")


@dataclass(frozen=True)
class Place:
    """Location of a rank's main thread: "folder/file.py:line (function)", and whether it is in a collective."""

    line: str
    collective: bool


def main_thread_place() -> Place:
    """Return the location of this process's main thread. Called in another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines, modules = list[str](), list[str]()
    while frame is not None and len(lines) < _INNERMOST:
        file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
        lines.append(f"{file}:{frame.f_lineno} ({frame.f_code.co_name})")
        modules.append(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    return Place(lines[0] if lines else "an unknown place", any(name.startswith(_COLLECTIVES) for name in modules))


def stalled_rank(places: Mapping[int, Place], names: Mapping[int, str]) -> tuple[int, str] | None:
    """Return the rank that the others wait for and one line, or None if the places do not show it.

    `places` are those of ranks that have not completed a step for nearly the timeout of collectives, `names` their
    hosts.
    """
    stalled = [rank for rank, place in sorted(places.items()) if not place.collective]
    if not stalled or len(stalled) == len(places):
        return None
    named = ", ".join(f"rank {rank} ({names.get(rank, 'this process')}) in {places[rank].line}" for rank in stalled[:4])
    more = f" and {len(stalled) - 4} more ranks" if len(stalled) > 4 else ""
    verb = "does" if len(stalled) == 1 else "do"
    return stalled[0], (
        f"a collective timed out, and all ranks are alive; {named}{more} {verb} not take part, "
        f"{len(places) - len(stalled)} wait"
    )


def places_in_words(places: Mapping[int, Place]) -> str:
    """Return the places with their first ranks, the rarest first."""
    ranks: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks.setdefault(place.line, []).append(rank)
    rarest = sorted(ranks, key=lambda line: len(ranks[line]))
    return "; ".join(
        f"rank {', '.join(map(str, ranks[line][:4]))}{' and more' if len(ranks[line]) > 4 else ''} in {line}"
        for line in rarest[:4]
    )


@dataclass(frozen=True)
class Failure:
    """Reason for the end of the run, in one line: the failed rank, and the exit code of all ranks."""

    rank: int
    code: int
    text: str


def record_failure(failure: Failure) -> None:
    """Append the exit code to SCAPE_FAILURE_FILE, whose first line decides whether a Slurm job is requeued.

    The launcher's own code does not: srun kills the other ranks after the first failure, and returns their 137 or 143.
    """
    if path := os.environ.get("SCAPE_FAILURE_FILE"):
        with contextlib.suppress(OSError), open(path, "a") as file:  # Must not change the outcome of the run.
            file.write(f"{failure.code} rank {failure.rank}\n")


class Liveness:
    """Heartbeats of this rank and its view of the others. See `join`.

    `connect` returns the store, at `place`, and is called in the thread that communicates with it; None for a single
    rank, without heartbeats. A process that `hosts` the store must outlive the last write. `hint`, called once,
    describes the effect of a restart, for the last line of a run.
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store] | None,
        rank: int,
        world: int = 1,
        place: str = "",
        hosts: bool = False,
    ) -> None:
        self.rank, self.world, self._store_address, self._hosts = rank, world, place, hosts
        self.hint: Callable[[], str] = str
        self._connect, self._is_single = connect, connect is None
        # The store handles about three thousand requests per second.
        self._interval = max(INTERVAL_SECONDS, world / 1000)
        self._silence_limit = SILENT_INTERVALS * self._interval
        self._limit = 300.0
        self._progress = self._last_response = time.monotonic()
        self._beats: dict[int, tuple[int, float]] = {}  # Other ranks' heartbeat count, and the time of its first read.
        self._names: dict[int, str] = {}
        self._places: dict[int, Place] = {}  # Of ranks without progress.
        self._has_place = self._places_logged = False
        self._failure: Failure | None = None
        self._to_report: Failure | None = None
        self._reported, self._leaving, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._print_lock = threading.Lock()  # Never released: only one thread prints the last line.
        self._alerted = self._suspicious = self._searching = False
        self._store_lost_at: float | None = None  # Time at which the store was lost.
        self._store_loss_logged = False
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._heartbeat_loop, "heartbeats"), (self._monitor_loop, "liveness"))
        ]
        for thread in () if self._is_single else self._threads:
            thread.start()

    @classmethod
    def join(cls, environment: Mapping[str, str]) -> "Liveness":
        """Return this rank's liveness, without heartbeats if there is one rank or no store."""
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if any(not environment.get(name) for name in needed) or environment["WORLD_SIZE"] == "1":
            return cls(None, int(environment.get("RANK") or 0))
        rank, world, address = int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment["MASTER_ADDR"]
        # torchrun's agent hosts a store. Without an agent rank 0 creates it, and init_process_group shares it.
        has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        hosts = rank == 0 and not has_agent
        store = _store(environment, is_master=True) if hosts else None
        if store is not None:
            store.set(_STARTED, "1")
        elif not has_agent:
            _wait_for_rank_0(environment)
        return cls(lambda: store or _store(environment), rank, world, f"{address}:{environment['MASTER_PORT']}", hosts)

    # ------------------------------------------------------------------------------ main thread

    def set_timeout(self, timeout: float) -> None:
        """Set the timeout of collectives; a rank without heartbeats for nearly as long is lost."""
        self._limit = max(timeout - 5.0, 0.8 * timeout)
        self._progress = time.monotonic()

    def report_progress(self) -> None:
        """Record progress of the main thread, which restarts its timeout."""
        self._progress = time.monotonic()

    @property
    def failure(self) -> Failure | None:
        """Reason for the end of the run, if this rank has received one."""
        return self._failure

    def report(self, failure: Failure, patience: float | None = None) -> None:
        """Report this rank's failure to the others; wait until it is written, for `patience` or a few seconds."""
        record_failure(failure)
        if self._is_single:
            return
        self._to_report = self._to_report or failure
        self._wake.set()
        if patience is None:
            responsive = time.monotonic() - self._last_response < 2 * self._interval
            patience = self._silence_limit if responsive else self._interval
        if self._reported.wait(patience) and self._hosts:
            time.sleep(2 * self._interval)  # Time for all ranks to read it.

    def find_failure(self) -> Failure | None:
        """Return the rank that made a collective fail, or None if it is not known. Takes up to twelve intervals."""
        if self._is_single:
            return None
        self._alerted = True
        self._wake.set()
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < 2 * self._silence_limit + 2 * self._interval:
            # Not immediately: if this process was halted, its view of the others is outdated.
            detected_failure = self._detect_failure(self._silence_limit) if waited > 2 * self._interval else None
            if detected_failure is None and waited > 2 * self._silence_limit and self._searching:
                stalled = stalled_rank(self._places, self._names)
                detected_failure = stalled and Failure(stalled[0], LOST, stalled[1])
            if failure := self._failure or detected_failure:
                self.report(failure)
                return self._failure or failure
            time.sleep(0.1)
        return None

    def leave(self) -> None:
        """Record that this rank has ended normally."""
        self._leaving.set()
        self._wake.set()
        if not self._is_single:
            self._threads[0].join(2.0)

    def end(self, failure: Failure) -> NoReturn:
        """Print the failure, unless this rank has printed a line already, and end the process immediately."""
        self.print_error(f"{failure.text}{self.resume_hint()}")
        sys.stdout.flush()
        os._exit(failure.code)

    def print_error(self, message: str) -> None:
        """Print the last line of this rank, once."""
        if self._print_lock.acquire(blocking=False):
            print_error(self.rank, message)

    def resume_hint(self) -> str:
        """Return the effect of a restart. A thread reads the checkpoint folder, whose file system may not respond."""
        hints: list[str] = []
        thread = threading.Thread(target=lambda: hints.append(self.hint()), daemon=True)
        thread.start()
        thread.join(2.0)
        return f"; {hints[0]}" if hints and hints[0] else ""

    # -------------------------------------------------------------------------------- store thread

    def _heartbeat_loop(self) -> None:
        assert self._connect is not None
        try:
            store = self._connect()
            store.set(f"name/{self.rank}", f"{socket.gethostname()}, process {os.getpid()}")
            while not self._leaving.is_set():
                self._update(store)
                self._last_response = time.monotonic()
                self._wake.wait(self._interval)
                self._wake.clear()
            self._update(store)
            store.add(f"beat/{self.rank}", _LEFT)
        except (RuntimeError, ValueError):  # Includes DistNetworkError, and values of other programs.
            self._store_lost_at = time.monotonic()
            self._reported.set()  # Nothing more can be written.

    def _update(self, store: dist.Store) -> None:
        """Send a heartbeat, write and read failures, and check others: O(1) requests unless a failure is suspected."""
        if self._to_report is not None and not self._reported.is_set():
            store.compare_set("failed", "", to_json(self._to_report))
        store.add(f"beat/{self.rank}", 1)
        if self._failure is None and (failure := _reported_failure(store)):
            self._failure = failure
            self._reported.set()
        stuck = self._alerted or time.monotonic() - self._progress >= self._limit
        if stuck or self._has_place:
            here = Place("a collective that failed", True) if self._alerted else main_thread_place()
            store.set(f"place/{self.rank}", to_json(here) if stuck else "")
            self._has_place = stuck
        successor = (self.rank + 1) % self.world
        suspicious = stuck or self._seconds_silent(successor) > self._silence_limit
        if suspicious != self._suspicious:
            self._suspicious = suspicious
            searchers = store.add("searchers", 1 if suspicious else -1)
            self._searching = suspicious and searchers <= _SEARCHERS
        for rank in range(self.world) if self._searching else [successor]:
            # The value is empty once the rank has moved on.
            if self._searching and store.check([f"place/{rank}"]) and (value := store.get(f"place/{rank}")):
                self._places[rank] = from_json(Place, value)
            if rank == self.rank:
                continue
            beat = store.add(f"beat/{rank}", 0)
            now = time.monotonic()
            if rank not in self._beats or beat != self._beats[rank][0]:
                self._beats[rank] = (beat, now)
            late = now - self._beats[rank][1] > 2 * self._interval or self._searching
            if late and rank not in self._names:
                known = store.check([f"name/{rank}"])
                self._names[rank] = store.get(f"name/{rank}").decode(errors="replace") if known else "not started"

    def _report_store_loss(self) -> None:
        """Log once that the store was lost although the run goes on.

        The store ends the connection of a rank that reads a counter for which another program wrote a text.
        """
        lost = self._store_lost_at
        if lost is not None and self._progress > lost + 2 * INTERVAL_SECONDS and not self._store_loss_logged:
            self._store_loss_logged = True
            logger.warning(
                f"the store at {self._store_address} no longer answers rank {self.rank}: the run "
                "continues, but lost ranks are detected by the timeout of collectives only"
            )

    def _report_places(self) -> None:
        """Log once where each rank is, if all have reported it: NCCL's watchdog may end this process next."""
        if self._searching and not self._places_logged and len(self._places) == self.world:
            self._places_logged = True
            seconds = time.monotonic() - self._progress
            logger.warning(f"no step was completed for {seconds:.0f} s: {places_in_words(self._places)}")

    # -------------------------------------------------------------------------------- monitor thread

    def _monitor_loop(self) -> None:
        launcher, looked = os.getppid(), time.monotonic()
        while not self._leaving.wait(0.5):
            now, before = time.monotonic(), looked
            looked = now
            failure = self._failure
            self._report_store_loss()
            if os.getppid() != launcher:
                failure = failure or Failure(self.rank, LOST, f"the launcher of rank {self.rank} has ended")
                self.report(failure)
                self.end(failure)  # Without a launcher nothing would stop this rank or read its output.
            # If this process was halted, it must read the others' heartbeats first.
            if now - before < 2 * self._interval and now - self._progress >= self._limit:
                failure = failure or self._detect_failure(self._limit)
                self._report_places()
            if failure is None:
                continue
            self.report(failure)
            if not self._leaving.wait(max(0.0, REACT_SECONDS - (time.monotonic() - now))):
                self.end(self._failure or failure)

    def _seconds_silent(self, rank: int) -> float:
        """Return the seconds between a rank's last heartbeat and the store's last response."""
        if rank not in self._beats or self._beats[rank][0] >= _LEFT:
            return 0.0
        return self._last_response - self._beats[rank][1]

    def _detect_failure(self, seconds: float) -> Failure | None:
        """Return a failure if ranks, or the store, have not responded for the given seconds."""
        now = time.monotonic()
        if self._store_lost_at is not None:
            if now - self._store_lost_at < 2 * INTERVAL_SECONDS:
                return None  # A more specific reason may arrive.
            reason = f"the store at {self._store_address} is gone: rank 0, its launcher or its host has ended"
            return Failure(0, LOST, reason)
        if now - self._last_response >= seconds:
            silent = now - self._last_response
            reason = (
                f"rank 0's host, the store at {self._store_address}, does not respond for {silent:.0f} s: the host or "
                "the link is lost"
            )
            return Failure(0, LOST, reason)
        lost = [rank for rank in sorted(self._beats) if self._seconds_silent(rank) >= seconds]
        if not lost:
            return None
        longest = max(self._seconds_silent(rank) for rank in lost)
        named = ", ".join(f"rank {rank} ({self._names.get(rank, 'name unknown')})" for rank in lost[:4])
        more = f" and {len(lost) - 4} more ranks" if len(lost) > 4 else ""
        verb = "is" if len(lost) == 1 else "are"
        return Failure(lost[0], LOST, f"{named}{more} {verb} lost: no heartbeat for {longest:.0f} s")


def _store(environment: Mapping[str, Any], is_master: bool = False, timeout: float = 300.0) -> dist.Store:
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    own = None
    if is_master:
        with contextlib.suppress(WrongEndpointError):  # TCPStore fails at the same name, where errors are handled.
            own = listen_when_free(host, port)
    store = dist.TCPStore(
        host,
        port,
        is_master=is_master,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if own is None else own.detach(),
    )
    # A requeued job has the address and port of its last start, and the store of that may still be there.
    start = "-".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"))
    return dist.PrefixStore(f"scape/liveness/{start}/{environment.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _wait_for_rank_0(environment: Mapping[str, str]) -> None:
    """Wait until rank 0 of this start serves the store, or raise SystemExit after `START_SECONDS`."""
    deadline = time.monotonic() + START_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(RuntimeError):  # Nothing listens, or the server ended.
            if _store(environment, timeout=left).check([_STARTED]):
                return
        time.sleep(0.5)
    where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    raise SystemExit(
        f"error: rank 0 of this job does not answer at {where} (MASTER_ADDR, MASTER_PORT) after {START_SECONDS:.0f} s"
    )


def _reported_failure(store: dist.Store) -> Failure | None:
    """Return the failure that a rank has reported."""
    value = store.get("failed") if store.check(["failed"]) else b""
    return from_json(Failure, value) if value else None


def report_failure_of(rank: int, process: int, outcome: str, address: str, port: int) -> None:
    """Report the end of a rank on behalf of the rank, by its launcher, so that the others name it immediately."""
    failure = Failure(rank, LOST, f"rank {rank} ({socket.gethostname()}, process {process}) {outcome}")
    store = _store({"MASTER_ADDR": address, "MASTER_PORT": port}, timeout=5.0)
    store.compare_set("failed", "", to_json(failure))


def failure_known(address: str, port: int) -> Callable[[], bool]:
    """Return a function that checks whether a failure was reported, for a launcher whose own rank may be halted."""
    store: list[dist.Store] = []

    def known() -> bool:
        try:
            if not store:
                store.append(_store({"MASTER_ADDR": address, "MASTER_PORT": port}, timeout=5.0))
            return _reported_failure(store[0]) is not None
        except (RuntimeError, TimeoutError, ValueError):  # The link is down, which the ranks handle.
            return False

    return known


def print_error(rank: int | str, message: str) -> None:
    """Print the last line of a rank."""
    print(f"[rank {rank}] error: {message}", file=sys.stderr, flush=True)

"""torchrun, for runs that are stopped, that break, and that are started again.

python -m torchtitan_scape.runtime.launch --nproc_per_node=2 ... -m torchtitan_scape.train ...

SIGTERM, SIGINT, SIGUSR1 and SIGHUP reach the ranks, which write a checkpoint and end by themselves. A run that broke is
started again up to MAX_RESTARTS times in a row without progress; this process then replaces itself, so that nothing
of the old start is left. The report of a failed rank is one line instead of a traceback.

MAX_RESTARTS   restarts without progress before giving up; 0 for none         STOP_SECONDS   for the ranks to end by
               themselves after a signal, 1800 unless set                     SCAPE_*        between starts of one run
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api as launcher_api
from torch.distributed.run import main as torchrun

from torchtitan_scape.core.patching import replaced
from torchtitan_scape.runtime.liveness import LOST, NOT_SAVED, STOPPED, WRONG_INPUT, failure_known, tell_for

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# What a rank ends with of its own accord, having told the others why.
OWN_CODES = (WRONG_INPUT, LOST, NOT_SAVED, STOPPED, 128 + signal.SIGINT, 128 + signal.SIGTERM)
END_SECONDS = 10.0  # for the other ranks of a node to say who is lost; one that is halted never would
AGENT_SECONDS = 20.0  # for torchrun's agent to return when its ranks have ended
PAUSE_SECONDS = 3.0  # before this process goes: ranks elsewhere read from its store who was lost
REJOIN_SECONDS = 600.0  # after a failure, until the launchers of all nodes have found each other again


class Ranks:
    """The processes that this launcher has started, and what it was asked to do with them.

    The signals are blocked, in this process and in the ranks until they listen: torchrun's own handlers would end
    the ranks at once, and one that arrives while they start would be lost.
    """

    def __init__(self, stop_seconds: float, finish: Callable[[int], Any]) -> None:
        self._finish = finish
        self.asked: signal.Signals | None = None
        self.pids: list[int] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.across_nodes, self.store = False, ("", 0)
        self._stop_seconds = stop_seconds
        hang_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # as under nohup
        self._waited_for = SIGNALS if hang_up else SIGNALS[:-1]
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=self._forward, name="signals", daemon=True).start()

    def _forward(self) -> None:
        while True:
            number = signal.Signals(signal.sigwait(self._waited_for))
            number = signal.SIGTERM if number == signal.SIGHUP else number
            if not self.pids:
                _say(f"{number.name}: stopped while no ranks were running")
                os._exit(STOPPED if "SCAPE_RESTARTS" in os.environ else 128 + number)
            if self.asked is None:
                self.send_later(signal.SIGKILL, self._stop_seconds)
            self.asked = number
            self.send(number)

    def codes(self) -> set[int | None]:
        """Exit codes of the ranks; None for one that runs."""
        return {process.poll() for process in self.processes}

    def watch(self) -> None:
        """Ends this launcher some time after the ranks: the agent may be asking a node that does not answer."""
        known, since = failure_known(*self.store) if self.across_nodes else lambda: False, 0.0
        while None in self.codes():
            time.sleep(1.0)
            if since == 0.0 and known():
                since = time.monotonic()
            if since and time.monotonic() - since > END_SECONDS:  # they had time to say it and end
                self.send(signal.SIGKILL)
        if self.codes() != {0}:
            time.sleep(AGENT_SECONDS)
            _say("the ranks have ended, and the other nodes' launchers do not answer")
            self._finish(_final(self.codes()))

    def send(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def send_later(self, number: signal.Signals, seconds: float) -> None:
        timer = threading.Timer(seconds, self.send, [number])
        timer.daemon = True
        timer.start()

    def agent(self) -> type[LocalElasticAgent]:
        """torchrun's agent, which tells us what it starts, and tells the other ranks which of its own has died."""
        ranks = self

        class Agent(LocalElasticAgent):
            def _start_workers(self, worker_group: Any) -> Any:
                found = super()._start_workers(worker_group)
                ranks.pids = list(found.values())
                ranks.across_nodes = worker_group.group_world_size > 1
                ranks.store = worker_group.master_addr, worker_group.master_port
                if ranks.asked is not None:
                    ranks.send(ranks.asked)
                ranks.processes = [handler.proc for handler in self._pcontext.subprocess_handlers.values()]
                threading.Thread(target=ranks.watch, name="watch", daemon=True).start()
                return found

            def _monitor_workers(self, worker_group: Any) -> Any:
                # Before the parent sees it, asks the others to end and waits until they have.
                for worker in worker_group.workers:
                    process = self._pcontext.subprocess_handlers[worker.local_rank].proc
                    if not (code := process.poll()):
                        continue
                    ranks.send_later(signal.SIGKILL, END_SECONDS)
                    if code not in OWN_CODES and worker.world_size > 1:
                        place = worker_group.master_addr, worker_group.master_port
                        with contextlib.suppress(RuntimeError):  # the store's host is gone: they know
                            tell_for(worker.global_rank, process.pid, _ended(code), *place)
                    break
                return super()._monitor_workers(worker_group)

        return Agent


def main() -> None:
    for name in ("agent.server.api", "multiprocessing.api", "multiprocessing.errors.error_handler"):
        # Their reports of a failed rank, of several lines, would stand around ours.
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    limit, stop_seconds = _number("MAX_RESTARTS", 0), _number("STOP_SECONDS", 1800)
    if not {"SCAPE_RESTARTS", "SCAPE_PROGRESS_FILE"} <= os.environ.keys():
        number, os.environ["SCAPE_PROGRESS_FILE"] = tempfile.mkstemp(prefix="scape-")
        os.close(number)
    progress = Path(os.environ["SCAPE_PROGRESS_FILE"])
    # Where the ranks can wait for a link to come back, the launchers can, too: torchrun gives up after 60 s.
    options = os.environ.get("PET_RDZV_CONF", "")
    if "read_timeout" not in options:
        os.environ["PET_RDZV_CONF"] = ",".join(filter(None, (options, f"read_timeout={REJOIN_SECONDS:.0f}")))
    finished = threading.Lock()

    def finish(code: int) -> NoReturn:
        with finished:  # for good
            if code == LOST and ranks.asked is None and limit:
                _restart(limit, progress)
            progress.unlink(missing_ok=True)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    ranks = Ranks(stop_seconds, finish)
    code = 0
    try:
        with replaced(launcher_api, "LocalElasticAgent", ranks.agent()):
            torchrun(sys.argv[1:])
    except ChildFailedError as error:
        ranks.pids = []
        code, line = _judged(error, ranks)
        _say(line, error=code != STOPPED)
        if ranks.across_nodes:
            time.sleep(PAUSE_SECONDS)  # the exception holds the store
    except (RendezvousError, RuntimeError, TimeoutError) as error:
        ranks.pids = []
        code = _final(ranks.codes())  # the agent has waited for them, if there are any
        if ranks.processes or not _may_rejoin():
            _say(f"the launchers did not find each other, or lost each other: {' '.join(str(error).split())}")
        elif limit:
            time.sleep(1.0)
            _start_again()
    finish(code)


def _judged(error: ChildFailedError, ranks: Ranks) -> tuple[int, str]:
    """The exit code of the run on this node, and what to say."""
    codes = {failure.exitcode for failure in error.failures.values()}
    if STOPPED in codes:
        return STOPPED, f"stopped early, with a checkpoint: start the same again to go on (exit code {STOPPED})"
    if ranks.asked is not None and -ranks.asked in codes:
        return 128 + ranks.asked, f"stopped by {ranks.asked.name} before the ranks listened; nothing was saved"
    rank, failure = error.get_first_failure()
    told: Any = failure.message
    if isinstance(told, dict):  # the exception that the rank left behind
        message = told["message"].partition(": ")[2]
    elif failure.exitcode > 0:
        message = "its message stands above"
    else:
        message = told  # which signal ended it
    return _final(codes), f"rank {rank} {_ended(failure.exitcode)}: {message}"


def _final(codes: Collection[int | None]) -> int:
    """The exit code of a launcher whose ranks ended with these."""
    decisive = (STOPPED, WRONG_INPUT, NOT_SAVED, 128 + signal.SIGINT, 128 + signal.SIGTERM)
    return next((code for code in decisive if code in codes), LOST)


def _ended(code: int) -> str:
    return f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


def _restart(limit: int, progress: Path) -> None:
    """Starts all again, unless the last `limit` starts have come no further. Returns if so."""
    taken, before = (int(word) for word in os.environ.get("SCAPE_RESTARTS", "0 -1").split())
    steps = [line.split()[1] for line in progress.read_text().splitlines()] if progress.exists() else []
    reached = int(steps[-1]) if steps else -1
    if reached > before:
        taken = 0  # this start resumed later than the one before: its predecessor had saved something new
    if taken >= limit:
        _say(f"not started again: {limit} restarts (MAX_RESTARTS) have not come further than step {max(reached, 0)}")
        return
    os.environ["SCAPE_RESTARTS"] = f"{taken + 1} {max(reached, before)}"
    os.environ["SCAPE_REJOIN_SINCE"] = str(time.time())
    _say(f"starting again, restart {taken + 1} of {limit} without progress", error=False)
    time.sleep(1.0)
    _start_again()


def _may_rejoin() -> bool:
    """Whether other nodes may still be on their way back from a failure."""
    return time.time() - float(os.environ.get("SCAPE_REJOIN_SINCE", "0")) < REJOIN_SECONDS


def _start_again() -> NoReturn:
    # The signals stay blocked over exec: one that arrives meanwhile waits.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _number(name: str, default: int) -> int:
    value = os.environ.get(name) or str(default)
    if not value.isdigit():
        _say(f"{name}={value}; it must be a number, 0 or more")
        sys.exit(WRONG_INPUT)
    return int(value)


def _say(line: str, error: bool = True) -> None:
    print(f"error: {line}" if error else line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

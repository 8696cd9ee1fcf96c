"""torchrun's agent on this node: stops, failures and restarts of its ranks. `launch` starts it."""

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn, TextIO

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousParameters
from torch.distributed.launcher import api as launcher_api
from torch.distributed.run import main as torchrun

from torchtitan_scape.core.patching import replaced
from torchtitan_scape.runtime.launch import SIGNALS
from torchtitan_scape.runtime.listening import WrongEndpointError
from torchtitan_scape.runtime.liveness import LOST, NOT_SAVED, STOPPED, WRONG_INPUT, failure_known, report_failure_of
from torchtitan_scape.runtime.rendezvous import BACKEND, LauncherRendezvous, RunEndedError

# Exit codes of a rank that has reported its reason to the other ranks.
OWN_CODES = (WRONG_INPUT, LOST, NOT_SAVED, STOPPED, 128 + signal.SIGINT, 128 + signal.SIGTERM)
END_SECONDS = 10.0  # Time for the other ranks of a node to report the lost rank and end; a halted one never would.
AGENT_SECONDS = 20.0  # Time for torchrun's agent to return after its ranks have ended.
NODE_COUNTS = "SCAPE_NODE_COUNTS"  # Environment variables: usable numbers of nodes, ascending, as JSON;
EXPECTED_NODES = "SCAPE_EXPECTED_NODES"  # the number of nodes after a stop for nodes that wait.
PAUSE_SECONDS = 3.0  # Delay before this process exits, in which ranks of other nodes read the reason from its store.


class Output:
    """A standard stream that discards text once its reader is gone: a closed terminal, or a `tee` that has ended."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._tried(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._tried(lambda: self._stream.flush())

    def _tried(self, action: Callable[[], int | None]) -> int | None:
        try:
            return action()
        except OSError:
            self._stream = open(os.devnull, "w")  # noqa: SIM115  # Until the process ends.
            return None


class LocalRanks:
    """The ranks that this launcher has started, and the signals to forward to them.

    `launch` has blocked the signals in this process, and thereby in the ranks until these install their handlers.
    Otherwise torchrun's own handlers would end the ranks immediately, and a signal during startup would be lost.
    """

    def __init__(self, stop_seconds: float, finish: Callable[[int], Any]) -> None:
        self._finish = finish
        self.requested: signal.Signals | None = None
        self.pids: list[int] = []
        self.starting = threading.Lock()  # Held while ranks are started, whose pids are not known yet.
        self.processes: list[subprocess.Popen[bytes]] = []
        self.across_nodes, self.store = False, ("", 0)
        self.rendezvous: LauncherRendezvous | None = None
        self._stop_seconds = stop_seconds
        hang_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # as under nohup
        self._forwarded = SIGNALS if hang_up else SIGNALS - {signal.SIGHUP}
        threading.Thread(target=self._forward_signals, name="signals", daemon=True).start()

    def _forward_signals(self) -> None:
        while True:
            number = signal.Signals(signal.sigwait(self._forwarded))
            number = signal.SIGTERM if number == signal.SIGHUP else number
            with self.starting:
                running = bool(self.pids)
            if not running:
                _print_line(f"{number.name}: stopped while no ranks were running")
                self._finish(STOPPED if "SCAPE_RESTARTS" in os.environ else 128 + number)
            if self.requested is None:
                self.send_later(signal.SIGKILL, self._stop_seconds)
            self.requested = number
            self.send(number)

    @property
    def regroups(self) -> bool:
        """Whether the ranks stop for nodes that join, and not because of a signal to this launcher."""
        return self.rendezvous is not None and self.rendezvous.regroups > 0 and self.requested is None

    def create_rendezvous(self, parameters: RendezvousParameters) -> LauncherRendezvous:
        """Return the rendezvous for torchrun's agent."""
        try:
            last_call = parameters.get_as_int("last_call_timeout", 30)
            join = parameters.get_as_int("join_timeout", 0)
        except ValueError as error:
            raise WrongEndpointError(f"PET_RDZV_CONF: {error}") from None
        counts = json.loads(os.environ.get(NODE_COUNTS) or f"[{parameters.max_nodes}]")
        self.rendezvous = LauncherRendezvous(
            parameters.endpoint,
            tuple(counts),
            parameters.run_id,
            lambda line: _print_line(line, error=False),
            float(last_call or 0),
            on_join=lambda: self.send(signal.SIGUSR1),
            expected=int(os.environ.pop(EXPECTED_NODES, 0)),
            join=float(join or 0),
        )
        return self.rendezvous

    def codes(self) -> set[int | None]:
        """Return the exit codes of the ranks; None for a running one."""
        return {process.poll() for process in self.processes}

    def watch(self) -> None:
        """End this launcher some time after its ranks, because the agent may wait for a node that does not respond."""
        if self.across_nodes:  # In a thread of its own: the store does not respond if its host is lost.
            threading.Thread(target=self._end_after_failure, name="failure", daemon=True).start()
        while None in self.codes():
            time.sleep(1.0)
        if self.codes() != {0}:
            time.sleep(AGENT_SECONDS)
            _print_line("the ranks have ended, and the other nodes' launchers do not respond")
            self._finish(_exit_code(self.codes()))

    def _end_after_failure(self) -> None:
        """End the ranks if they still run some time after a failure was reported, for example halted ones."""
        known = failure_known(*self.store)
        while None in self.codes() and not known():
            time.sleep(1.0)
        time.sleep(END_SECONDS)  # They have time to report it and to end.
        while None in self.codes():
            self.send(signal.SIGKILL)
            time.sleep(1.0)

    def send(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def send_later(self, number: signal.Signals, seconds: float) -> None:
        timer = threading.Timer(seconds, self.send, [number])
        timer.daemon = True
        timer.start()

    def agent(self) -> type[LocalElasticAgent]:
        """Return torchrun's agent class, which records started ranks, and reports a dead rank to the other ranks."""
        ranks = self

        class Agent(LocalElasticAgent):
            def _start_workers(self, worker_group: Any) -> Any:
                with ranks.starting:
                    pids = super()._start_workers(worker_group)
                    ranks.pids = list(pids.values())
                ranks.across_nodes = worker_group.group_world_size > 1
                ranks.store = worker_group.master_addr, worker_group.master_port
                if ranks.requested is not None:
                    ranks.send(ranks.requested)
                ranks.processes = [handler.proc for handler in self._pcontext.subprocess_handlers.values()]
                threading.Thread(target=ranks.watch, name="watch", daemon=True).start()
                return pids

            def _monitor_workers(self, worker_group: Any) -> Any:
                # The parent class would first terminate the other ranks and wait for them.
                for worker in worker_group.workers:
                    process = self._pcontext.subprocess_handlers[worker.local_rank].proc
                    if not (code := process.poll()):
                        continue
                    ranks.send_later(signal.SIGKILL, END_SECONDS)
                    if code not in OWN_CODES and worker.world_size > 1:
                        store = worker_group.master_addr, worker_group.master_port
                        with contextlib.suppress(RuntimeError):  # The store is gone, which the other ranks detect.
                            report_failure_of(worker.global_rank, process.pid, _exit_text(code), *store)
                    break
                return super()._monitor_workers(worker_group)

        return Agent


def main() -> None:
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)  # type: ignore[assignment]
    for name in ("agent.server.api", "multiprocessing.api", "multiprocessing.errors.error_handler"):
        # Suppress their multi-line reports of a failed rank.
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    limit, stop_seconds = _number("MAX_RESTARTS", 0), _number("STOP_SECONDS", 1800)
    if not {"SCAPE_RESTARTS", "SCAPE_PROGRESS_FILE"} <= os.environ.keys():
        number, os.environ["SCAPE_PROGRESS_FILE"] = tempfile.mkstemp(prefix="scape-")
        os.close(number)
    progress = Path(os.environ["SCAPE_PROGRESS_FILE"])
    finished = threading.Lock()
    # torchrun would leave a folder with the output of all ranks in /tmp.
    output = Path(tempfile.mkdtemp(prefix="scape-"))

    def finish(code: int, final: bool = False) -> NoReturn:
        with finished:  # Never released: this process exits or is replaced.
            shutil.rmtree(output, ignore_errors=True)
            if code == STOPPED and ranks.regroups:
                assert ranks.rendezvous is not None
                os.environ.setdefault("SCAPE_RESTARTS", "0 -1")
                os.environ[EXPECTED_NODES] = str(ranks.rendezvous.regroups)
                _reexecute()
            if code == LOST and ranks.requested is None and limit and not final:
                _restart(limit, progress)
            if ranks.rendezvous is not None:
                ranks.rendezvous.close(code)
            if progress.name.startswith("scape-"):  # not the file of a Slurm job
                progress.unlink(missing_ok=True)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    ranks = LocalRanks(stop_seconds, finish)
    rendezvous_handler_registry.register(BACKEND, ranks.create_rendezvous)
    code, final = 0, False
    try:
        with replaced(launcher_api, "LocalElasticAgent", ranks.agent()):
            torchrun([f"--log_dir={output}", *sys.argv[1:]])
    except ChildFailedError as error:
        ranks.pids = []
        code, line = _outcome(error, ranks)
        _print_line(line, error=code != STOPPED)
        if ranks.across_nodes:
            time.sleep(PAUSE_SECONDS)  # The exception keeps the store alive.
    except WrongEndpointError as error:
        code = WRONG_INPUT
        _print_line(str(error))
    except RunEndedError as error:
        code, final = error.code, True
        _print_line(str(error), error=code != 0)
    except (RendezvousError, RuntimeError, TimeoutError) as error:
        ranks.pids = []
        code = _exit_code(ranks.codes())  # The agent has waited for the ranks, if any were started.
        final = isinstance(error, RendezvousError)  # A restart would wait for the same nodes again.
        _print_line(f"the rendezvous of the launchers failed or was lost: {' '.join(str(error).split())}")
    finish(code, final)


def _outcome(error: ChildFailedError, ranks: LocalRanks) -> tuple[int, str]:
    """Return the exit code of the run on this node, and the line to print."""
    codes = {failure.exitcode for failure in error.failures.values()}
    if STOPPED in codes and ranks.rendezvous is not None:
        ranks.rendezvous.look_after_stop()
    if STOPPED in codes and ranks.regroups:
        return STOPPED, "stopped with a checkpoint; restarting with the nodes that have joined"
    if STOPPED in codes:
        return STOPPED, f"stopped early, with a checkpoint: run the same command again (exit code {STOPPED})"
    if ranks.requested is not None and -ranks.requested in codes:
        return (
            128 + ranks.requested,
            f"stopped by {ranks.requested.name} before the ranks handled signals; nothing was saved",
        )
    _print_hidden_traceback(error)
    rank, failure = error.get_first_failure()
    report: Any = failure.message
    if isinstance(report, dict):  # The exception that the rank recorded.
        message = report["message"].partition(": ")[2]
    elif failure.exitcode > 0:
        message = "see its message above"
    else:
        message = report  # Names the signal.
    return _exit_code(codes), f"rank {rank} {_exit_text(failure.exitcode)}: {message}"


def _print_hidden_traceback(error: ChildFailedError) -> None:
    """Print the traceback of an unexpected error if only ranks had it whose output is not shown, and deleted."""
    shown = next((one.partition("=")[2].split(",") for one in sys.argv if one.startswith("--local-ranks-filter=")), [])
    reports = {str(one.local_rank): one.message for one in error.failures.values() if isinstance(one.message, dict)}
    # `Shutdown` records a ConnectionError if another rank failed, and a ValueError for wrong input.
    own = [rank for rank, report in reports.items() if report["message"].startswith("RuntimeError: ")]
    if shown and own and not set(own) & set(shown):
        print(reports[own[0]]["extraInfo"]["py_callstack"], end="", file=sys.stderr)


def _exit_code(codes: Collection[int | None]) -> int:
    """Return the exit code of a launcher from those of its ranks."""
    decisive = (STOPPED, WRONG_INPUT, NOT_SAVED, 128 + signal.SIGINT, 128 + signal.SIGTERM)
    return next((code for code in decisive if code in codes), LOST)


def _exit_text(code: int) -> str:
    """Return an exit code in words."""
    return f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


def _restart(limit: int, progress: Path) -> None:
    """Restart the run, unless the last `limit` restarts made no progress. Returns only if the limit is reached."""
    restarts, best = (int(word) for word in os.environ.get("SCAPE_RESTARTS", "0 -1").split())
    steps = [line.split()[1] for line in progress.read_text().splitlines()] if progress.exists() else []
    reached = int(steps[-1]) if steps else -1
    if reached > best:
        restarts = 0  # This start resumed from a newer checkpoint than the previous one.
    if restarts >= limit:
        _print_line(f"not restarted: {limit} restarts (MAX_RESTARTS) made no progress beyond step {max(reached, 0)}")
        return
    os.environ["SCAPE_RESTARTS"] = f"{restarts + 1} {max(reached, best)}"
    _print_line(f"restarting, restart {restarts + 1} of {limit} without progress", error=False)
    time.sleep(1.0)
    _reexecute()


def _reexecute() -> NoReturn:
    """Replace this process by a new launcher with the same arguments."""
    # Signals stay blocked across exec, so one that arrives in between stays pending.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _number(name: str, default: int) -> int:
    value = os.environ.get(name) or str(default)
    if not value.isdigit():
        _print_line(f"{name}={value}; it must be a number, 0 or more")
        sys.exit(WRONG_INPUT)
    return int(value)


def _print_line(line: str, error: bool = True) -> None:
    print(f"error: {line}" if error else line, file=sys.stderr, flush=True)

"""How a rank ends: as it should, stopped on request, or in one line that says what went wrong, with an exit code.

A stop is asked for by a signal. It reaches one rank or all; the ranks agree on the step in the flag that they
all-reduce anyway (`FiniteGuard`), write a checkpoint, and end with exit code 75.
"""

import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from torchtitan_scape.runtime.liveness import LOST, NOT_SAVED, STOPPED, WRONG_INPUT, Failure, Liveness

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CLOSE_SECONDS = 3.0  # for what is nice to have on disk when a run breaks, such as the last figures


class StoppedEarly(SystemExit):
    """Raised on every rank at the same step."""

    def __init__(self, code: int, line: str) -> None:
        super().__init__(code)
        self.line = line


class StopRequest:
    """Whether a signal has asked this rank to stop. Seen at once, whatever the main thread waits for.

    A second SIGTERM or SIGINT, a second after the first or later, ends the process at once. SIGUSR1 only ever asks:
    Slurm sends SIGTERM after it when the job's time is over, and a checkpoint may be on its way.
    """

    def __init__(self, announce: Callable[[signal.Signals], Any], end_at_once: Callable[[signal.Signals], Any]) -> None:
        self.signal: signal.Signals | None = None
        self.at = 0.0
        self._announce, self._end_at_once = announce, end_at_once
        self._urged_at: float | None = None
        self._pipe, write = os.pipe()
        os.set_blocking(write, False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: None)  # the byte in the pipe is what counts
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked by launch.py until someone listens

    def asked(self) -> bool:
        return self.signal is not None

    def _listen(self) -> None:
        while True:
            for number in os.read(self._pipe, 16):
                if number in STOP_SIGNALS:
                    self._take(signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number != signal.SIGUSR1:
            if self._urged_at is not None and now - self._urged_at >= 1.0:
                self._end_at_once(number)
            self._urged_at = self._urged_at or now
        if self.signal is None:
            self.signal, self.at = number, now
            self._announce(number)


class Shutdown:
    """What a rank needs to end well. Made once a process, at the start of `main`."""

    def __init__(self) -> None:
        self.liveness = Liveness.join(os.environ)
        self.rank = self.liveness.rank
        self.stop = StopRequest(self._announce, self._end_at_once)
        self.close: Callable[[], Any] | None = None
        # Who starts runs again wants to know whether they get further: one rank of a node, or of all, writes it down.
        self._progress = os.environ.get("SCAPE_PROGRESS_FILE") if os.environ.get("LOCAL_RANK") == "0" else None

    def watch_over(self, trainer: Any) -> None:
        """From here on the trainer ends with the process, and a signal stops it."""
        self.close = trainer.close
        trainer.shutdown = self
        trainer.replica_optimizer.guard.asked_to_stop = self.stop.asked
        enabled = trainer.checkpointer.enable
        self.liveness.hint = lambda: _resume_hint(trainer.checkpointer)
        if not enabled and os.environ.get("MAX_RESTARTS", "0") != "0" and self.rank == 0:
            logger.warning("MAX_RESTARTS without checkpoint.enable: a run that is started again begins at step 1")

    def expect(self, timeout: float) -> None:
        """Collectives wait for `timeout` seconds from now on."""
        self.liveness.expect(timeout)

    def after_step(self, trainer: Any, first: bool) -> None:
        """Tells that the main thread moves on; after the first step of this process also where it began."""
        if first:
            self._note(f"resumed {trainer.step - 1}")
            self.expect(trainer.job_config.comm.train_timeout_seconds)
        else:
            self.liveness.progressed()

    def stop_here(self, trainer: Any) -> NoReturn:
        """Writes a checkpoint of this step and raises StoppedEarly. A collective call."""
        begin, step, checkpointer = time.monotonic(), trainer.step, trainer.checkpointer
        told = f", {begin - self.stop.at:.1f} s after {self.stop.signal.name}" if self.stop.signal else ""
        if not checkpointer.enable or checkpointer.load_only:
            line = f"stopped on request at step {step}{told}, and nothing was saved"
            raise StoppedEarly(NOT_SAVED, f"{line}: that needs --checkpoint.enable, without load_only")
        checkpointer.save_to_resume(step)
        self._note(f"stopped {step} {self.stop.signal.name if self.stop.signal else 'other'}")
        # Launchers end the ranks that are left when the first one ends.
        trainer.replica_optimizer.collectives.sum_over_all(torch.zeros_like(trainer.replica_optimizer.grad_norm)).item()
        raise StoppedEarly(
            STOPPED,
            f"Stopped on request at step {step}{told}; its checkpoint in {checkpointer.folder} took "
            f"{time.monotonic() - begin:.1f} s; start the same again to go on (exit code {STOPPED})",
        )

    def _announce(self, number: signal.Signals) -> None:
        """Later: torchrun sends SIGTERM to the ranks that are left when one dies, and they will say that instead."""

        def announce() -> None:
            if self.liveness.failure is None:
                logger.info(f"{number.name}: asked to stop; the ranks agree on a step and write a checkpoint")

        timer = threading.Timer(2.0, announce)
        timer.daemon = True
        timer.start()

    def _end_at_once(self, number: signal.Signals) -> None:
        line = f"ended at once by a second {number.name}"
        self.liveness.say(line)
        self.liveness.tell(self._failure(128 + number, f"was {line}"), patience=1.0)
        os._exit(128 + number)

    def run(self, work: Callable[[], None], user_errors: tuple[type[Exception], ...]) -> NoReturn:
        """Does the work and ends the process.

        All is written then. Threads of gloo or the log writer that ask for the interpreter while it is taken down
        abort the process, now and then, and a run that went well would be told to have failed; and threads of the
        process group may be waiting for ranks that fail likewise.
        """
        code = 0
        try:
            work()
            self._close(None)
            if dist.is_initialized():
                dist.destroy_process_group()
        except StoppedEarly as early:
            code = int(early.code or 0)
            if code == STOPPED:
                (logger.info if self.rank == 0 else logger.debug)(early.line)
            else:
                self.liveness.say(early.line)
            self._close(CLOSE_SECONDS)
        except SystemExit as error:  # of the parser: its message stands above, or is the code
            code = error.code if isinstance(error.code, int) else 1 if error.code else 0
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr, flush=True)
            if code:
                self.liveness.tell(self._failure(code, f"stopped with exit code {code}"))
        except user_errors as error:
            code = getattr(error, "exit_code", WRONG_INPUT)
            if os.environ.get("SCAPE_TRACEBACK"):
                traceback.print_exc()
            message = f"{' '.join(str(error).split())} (SCAPE_TRACEBACK=1 shows where)"
            get_error_handler().record_exception(ValueError(message))  # for the launcher
            self.liveness.say(message)
            self.liveness.tell(self._failure(code, f"stopped: {' '.join(str(error).split())}"))
            self._close(CLOSE_SECONDS)
        except BaseException as error:
            code = self._broken(error)
            self._close(CLOSE_SECONDS)
        self.liveness.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _broken(self, error: BaseException) -> int:
        """Says who is lost, or what broke here. Returns the exit code."""
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        failure = self.liveness.failure or (self.liveness.explain() if _may_come_from_another(error) else None)
        if failure is not None and failure.rank != self.rank:
            line = f"{failure.text}{self.liveness.hinted()}"
            get_error_handler().record_exception(ConnectionError(line))
            self.liveness.say(line)
            if os.environ.get("SCAPE_TRACEBACK"):
                traceback.print_exception(error)
            return failure.code
        get_error_handler().record_exception(RuntimeError(told))
        self.liveness.say(told)
        traceback.print_exception(error)
        self.liveness.tell(self._failure(LOST, f"stopped: {told}"))
        return LOST

    def _failure(self, code: int, what: str) -> Failure:
        return Failure(self.rank, code, f"rank {self.rank} {what}")

    def _close(self, seconds: float | None) -> None:
        if self.close is None:
            return
        close, self.close = self.close, None
        if seconds is None:
            close()
            return
        thread = threading.Thread(target=close, daemon=True)  # it may wait for what is lost
        thread.start()
        thread.join(seconds)

    def _note(self, line: str) -> None:
        if not self._progress:
            return
        try:
            with open(self._progress, "a") as file:
                file.write(f"{line}\n")
        except OSError as error:  # no reason to end otherwise than one would
            logger.warning(f"{self._progress} cannot be written: {error.strerror}")


def _resume_hint(checkpointer: Any) -> str:
    step = checkpointer.newest_step()
    if step > 0:
        return f"started again, training goes on after step {step}"
    return "there is no checkpoint: started again, training begins at step 1"


def _may_come_from_another(error: BaseException) -> bool:
    """Whether the error may come from another rank's end: of a collective, or of the store."""
    if isinstance(error, dist.DistError):
        return True
    words = r"gloo|nccl|rccl|connect|timed? ?out|peer|socket|store|collective|process group"
    return isinstance(error, (RuntimeError, OSError)) and re.search(words, str(error), re.IGNORECASE) is not None

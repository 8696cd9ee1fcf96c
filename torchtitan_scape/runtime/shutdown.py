"""End of a rank: normal, stopped on request, or failed with one line and an exit code.

A signal to one rank or to all requests a stop. The ranks agree on the step by the flag that they all-reduce anyway
(`FiniteGuard`), write a checkpoint, and end with exit code 75. Errors of set-up that a restart would repeat are one
line.
"""

import linecache
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from torchtitan_scape.core.files import FULL, may_pass, passing_cause
from torchtitan_scape.runtime.liveness import LOST, NOT_SAVED, STOPPED, WRONG_INPUT, Failure, Liveness, record_failure

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REQUESTED = "SCAPE_STOP_REQUESTED"  # environment variable: rank.sh received this signal before it started Python
CLOSE_SECONDS = 3.0  # Time to write optional files, such as the last metrics, after a failure.
# The programming errors by which TorchTitan rejects a value.
_REJECTIONS = (AssertionError, AttributeError, IndexError, KeyError, TypeError)
_OWN = ("torchtitan_scape", "scripts", "tests")
_COMPILER = ("torch._dynamo", "torch._inductor")
# Environment variables of folders that are not in the recipe, by a part of their usual paths.
_CACHES = {"huggingface": "HF_HOME", "torchinductor": "TORCHINDUCTOR_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}

_WRITTEN = "job.dump_folder, HF_HOME, TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR or TMPDIR, to which a run writes"


def setup_error(error: BaseException) -> str | None:
    """Return the line that reports an error of set-up, or None for an error that needs a traceback.

    Those with a line are errors of the operating system, failed imports, errors of torch.compile, operations that a
    device does not support, and assertions and the like in TorchTitan, which are its checks of the configuration.
    """
    if not isinstance(error, Exception) or isinstance(error, dist.DistError):
        return None
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and not may_pass(cause):
            return _os_error(cause)
        if isinstance(cause, ImportError):
            return f"a module cannot be imported: {' '.join(str(cause).split())}; install it, or set PYTHONPATH"
        cause = cause.__cause__
    if type(error).__module__.startswith(_COMPILER):
        return f"torch.compile failed: {text}; set --compile.no-enable"
    if isinstance(error, NotImplementedError):
        return f"not supported by this version of PyTorch or on this device: {text}"
    if isinstance(error, _REJECTIONS) and (place := _place_in_torchtitan(error.__traceback__)):
        return f"TorchTitan rejects the configuration: {text}, in {place}"
    return None


def _os_error(error: OSError) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ConnectionError):
        return f"{text or type(error).__name__}; without a network, set --training.dataset_path to a local copy"
    full = error.errno in FULL
    if error.filename is None:
        return f"{text}: free space in {_WRITTEN}" if full else text or type(error).__name__
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename)
    fix = "free space there, or choose another path" if full else "choose another path, or give this user access to it"
    for part, variable in _CACHES.items():
        if part in path:
            fix = f"set {variable} to a folder that this user can write to"
    reason = "it is a file, or a link to nothing" if isinstance(error, FileExistsError) else error.strerror
    return f"{path} cannot be used: {reason}; {fix}"


def _place_in_torchtitan(traceback: TracebackType | None) -> str:
    """Return module and source line if TorchTitan raised the error, or called PyTorch wrongly; otherwise ""."""
    place = ""
    while traceback is not None:
        frame = traceback.tb_frame
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "torchtitan":
            source = linecache.getline(frame.f_code.co_filename, traceback.tb_lineno).strip()
            place = f"{frame.f_globals['__name__']} ({source})"
        elif package in _OWN:
            place = ""
        traceback = traceback.tb_next
    return place


class StoppedEarly(SystemExit):
    """Raised on every rank at the same step after a stop on request."""

    def __init__(self, code: int, line: str) -> None:
        super().__init__(code)
        self.line = line


class StopRequest:
    """Stop requests by signals, handled immediately even while the main thread is blocked.

    A second SIGTERM or SIGINT, at least one second after the first, ends the process immediately. SIGUSR1 is only a
    request: Slurm sends SIGTERM after it when the job's time is over, and a checkpoint may be in progress.
    """

    def __init__(self, announce: Callable[[signal.Signals], Any], end_at_once: Callable[[signal.Signals], Any]) -> None:
        self.signal: signal.Signals | None = None
        self.requested_at = 0.0
        self._announce, self._end_at_once = announce, end_at_once
        self._urged_at: float | None = None
        self._pipe, write = os.pipe()
        os.set_blocking(write, False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: None)  # The wakeup pipe receives the signal.
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, STOP_SIGNALS
        )  # They were blocked until now, by launch.py or train.py.
        if name := os.environ.pop(REQUESTED, ""):
            os.kill(os.getpid(), signal.Signals[name])

    def requested(self) -> bool:
        return self.signal is not None

    def _listen(self) -> None:
        while True:
            for number in os.read(self._pipe, 16):
                if number in STOP_SIGNALS:
                    self._handle(signal.Signals(number))

    def _handle(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number != signal.SIGUSR1:
            if self._urged_at is not None and now - self._urged_at >= 1.0:
                self._end_at_once(number)
            self._urged_at = self._urged_at or now
        if self.signal is None:
            self.signal, self.requested_at = number, now
            self._announce(number)


class Shutdown:
    """Shutdown of a rank. Created once per process, at the start of `main`."""

    def __init__(self) -> None:
        self.liveness = Liveness.join(os.environ)
        self.rank = self.liveness.rank
        self.stop = StopRequest(self._announce, self._end_at_once)
        self.close: Callable[[], Any] | None = None
        self._is_setup = True  # until the first step of this process is complete
        # The launcher counts restarts without progress; local rank 0 writes the progress file.
        self._progress = os.environ.get("SCAPE_PROGRESS_FILE") if os.environ.get("LOCAL_RANK") == "0" else None

    def attach(self, trainer: Any) -> None:
        """Connect the trainer: it is closed with the process, and stops on a signal."""
        self.close = trainer.close
        trainer.shutdown = self
        trainer.replica_optimizer.guard.asked_to_stop = self.stop.requested
        enabled = trainer.checkpointer.enable
        self.liveness.hint = lambda: _resume_hint(trainer.checkpointer)
        if not enabled and os.environ.get("MAX_RESTARTS", "0") != "0" and self.rank == 0:
            logger.warning("MAX_RESTARTS without checkpoint.enable: a restarted run begins at step 1")

    def set_collective_timeout(self, timeout: float) -> None:
        """Set the timeout of collectives in seconds."""
        self.liveness.set_timeout(timeout)

    def after_step(self, trainer: Any, first: bool) -> None:
        """Record progress of the main thread, and after the first step of this process also the start step."""
        if first:
            self._is_setup = False
            self._append_progress(f"resumed {trainer.step - 1}")
            self.set_collective_timeout(trainer.job_config.comm.train_timeout_seconds)
        else:
            self.liveness.report_progress()

    def stop_here(self, trainer: Any) -> NoReturn:
        """Write a checkpoint of this step and raise StoppedEarly. Collective."""
        begin, step, checkpointer = time.monotonic(), trainer.step, trainer.checkpointer
        delay = f", {begin - self.stop.requested_at:.1f} s after {self.stop.signal.name}" if self.stop.signal else ""
        if not checkpointer.enable or checkpointer.load_only:
            line = f"stopped on request at step {step}{delay}, and nothing was saved"
            raise StoppedEarly(NOT_SAVED, f"{line}: saving needs --checkpoint.enable, without load_only")
        checkpointer.save_to_resume(step)
        self._append_progress(f"stopped {step} {self.stop.signal.name if self.stop.signal else 'other'}")
        # Synchronize, because launchers terminate the other ranks when the first one ends.
        trainer.replica_optimizer.collectives.sum_over_all(torch.zeros_like(trainer.replica_optimizer.grad_norm)).item()
        raise StoppedEarly(
            STOPPED,
            f"Stopped on request at step {step}{delay}; its checkpoint in {checkpointer.folder} took "
            f"{time.monotonic() - begin:.1f} s; run the same command again to continue (exit code {STOPPED})",
        )

    def _announce(self, number: signal.Signals) -> None:
        """Log the request later: torchrun sends SIGTERM to the other ranks if one dies, which is reported instead."""

        def announce() -> None:
            if self.liveness.failure is None:
                logger.info(f"{number.name}: stop requested; the ranks agree on a step and write a checkpoint")

        timer = threading.Timer(2.0, announce)
        timer.daemon = True
        timer.start()

    def _end_at_once(self, number: signal.Signals) -> None:
        line = f"ended immediately by a second {number.name}"
        self.liveness.print_error(line)
        self.liveness.report(self._failure(128 + number, f"was {line}"), patience=1.0)
        os._exit(128 + number)

    def run(self, work: Callable[[], None], user_errors: tuple[type[Exception], ...]) -> NoReturn:
        """Run `work` and end the process.

        Everything is written at that point. The process ends without interpreter shutdown, because threads of gloo or
        of the log writer that access the interpreter during shutdown occasionally abort the process, which would turn
        success into failure, and threads of the process group may be waiting for failed ranks.
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
                record_failure(self._failure(code, ""))  # srun kills the ranks that have not ended yet
                self.liveness.print_error(early.line)
            self._close(CLOSE_SECONDS)
        except SystemExit as error:  # From the argument parser; the message is printed already, or is the code.
            code = error.code if isinstance(error.code, int) else 1 if error.code else 0
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr, flush=True)
            if code:
                self.liveness.report(self._failure(code, f"stopped with exit code {code}"))
        except user_errors as error:
            code = self._rejected(error, str(error))
            self._close(CLOSE_SECONDS)
        except BaseException as error:
            text = setup_error(error) if self._is_setup and self.liveness.failure is None else None
            code = self._broken(error) if text is None else self._rejected(error, text)
            self._close(CLOSE_SECONDS)
        self.liveness.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _rejected(self, error: BaseException, text: str) -> int:
        """Print an error that needs no traceback, in one line. Return the exit code."""
        code: int = getattr(error, "exit_code", LOST if passing_cause(error) else WRONG_INPUT)
        if os.environ.get("SCAPE_TRACEBACK"):
            traceback.print_exc()
        text = " ".join(text.split())
        message = f"{text} (SCAPE_TRACEBACK=1 shows where)"
        get_error_handler().record_exception(ValueError(message))  # Read by the launcher.
        self.liveness.print_error(message)
        self.liveness.report(self._failure(code, f"stopped: {text}"))
        return code

    def _broken(self, error: BaseException) -> int:
        """Print the lost rank, or the error of this rank. Return the exit code."""
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        failure = self.liveness.failure or (
            self.liveness.find_failure() if _may_be_caused_by_another_rank(error) else None
        )
        if failure is not None and failure.rank != self.rank:
            line = f"{failure.text}{self.liveness.resume_hint()}"
            get_error_handler().record_exception(ConnectionError(line))
            self.liveness.print_error(line)
            if os.environ.get("SCAPE_TRACEBACK"):
                traceback.print_exception(error)
            return failure.code
        get_error_handler().record_exception(RuntimeError(message))
        self.liveness.print_error(message)
        traceback.print_exception(error)
        self.liveness.report(self._failure(LOST, f"stopped: {message}"))
        return LOST

    def _failure(self, code: int, outcome: str) -> Failure:
        return Failure(self.rank, code, f"rank {self.rank} ({socket.gethostname()}) {outcome}")

    def _close(self, seconds: float | None) -> None:
        if self.close is None:
            return
        close, self.close = self.close, None
        if seconds is None:
            close()
            return

        def try_to_close() -> None:
            with suppress(OSError, ValueError):  # The outcome of the run is reported already.
                close()

        thread = threading.Thread(target=try_to_close, daemon=True)  # It may block on a lost rank.
        thread.start()
        thread.join(seconds)

    def _append_progress(self, line: str) -> None:
        if not self._progress:
            return
        try:
            with open(self._progress, "a") as file:
                file.write(f"{line}\n")
        except OSError as error:  # Must not change the outcome of the run.
            logger.warning(f"{self._progress} cannot be written: {error.strerror}")


def _resume_hint(checkpointer: Any) -> str:
    """Return the effect of a restart in words."""
    try:
        step = checkpointer.newest_step()
    except OSError:
        return ""
    if step > 0:
        return f"after a restart training continues after step {step}"
    return "there is no checkpoint: after a restart training begins at step 1"


def _may_be_caused_by_another_rank(error: BaseException) -> bool:
    """Return whether the error may be caused by the end of another rank: an error of a collective or of the store."""
    if isinstance(error, dist.DistError):
        return True
    words = r"gloo|nccl|rccl|connect|timed? ?out|peer|socket|store|collective|process group"
    return isinstance(error, (RuntimeError, OSError)) and re.search(words, str(error), re.IGNORECASE) is not None

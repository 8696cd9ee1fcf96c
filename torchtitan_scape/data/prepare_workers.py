"""Parallel work in processes, with progress. No worker outlives the process that started it."""

import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from torchtitan_scape.core.command import one_line

SECONDS = 10.0  # Interval between progress lines.
RESUME_HINT = "run the same command again to continue"


def run(work: Callable[[int, Callable[[int, int, int], None]], None], n: int, workers: int, total: int) -> None:
    """Call `work(index, count)` for every index below `n`, each in one of `workers` processes.

    Args:
        work: Processes one index, and reports completed documents, tokens and bytes of text to `count`.
        n: Number of indices.
        workers: Number of processes.
        total: Bytes of all text; 0 if unknown, in which case the progress is that of completed indices.

    Raises:
        ValueError: A worker failed, with its message, or a process died. The others are terminated.
    """
    context = multiprocessing.get_context("fork")  # Workers inherit sources and tokenizer.
    next_index, errors = context.Value("q", 0), context.SimpleQueue()
    workers = max(1, min(workers, n))
    counts = context.RawArray("q", 4 * workers)
    parent = os.getpid()

    def body(slot: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def count(documents: int, tokens: int, n_bytes: int) -> None:
            for i, more in enumerate((documents, tokens, n_bytes)):
                counts[4 * slot + i] += more
            if os.getppid() != parent:
                os._exit(1)

        try:
            while True:
                with next_index.get_lock():
                    index, next_index.value = next_index.value, next_index.value + 1
                if index >= n:
                    return
                work(index, count)
                counts[4 * slot + 3] += 1
        except ValueError as error:
            errors.put(one_line(error))
        except Exception:
            traceback.print_exc()
            errors.put("a worker failed; its traceback is above")
        sys.exit(1)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        processes = [context.Process(target=body, args=(slot,), daemon=True) for slot in range(workers)]
        for process in processes:
            process.start()
    begin = last_report = time.monotonic()
    try:
        while alive := [process.sentinel for process in processes if process.exitcode is None]:
            wait(alive, timeout=SECONDS)
            _check(processes, errors)
            if time.monotonic() - last_report >= SECONDS:
                last_report = time.monotonic()
                print(_progress([sum(counts[i::4]) for i in range(4)], last_report - begin, n, total), flush=True)
        _check(processes, errors)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _check(processes: list[Any], errors: Any) -> None:
    for process in processes:
        if process.exitcode not in (None, 0):
            if not errors.empty():
                raise ValueError(errors.get())
            code = process.exitcode
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise ValueError(f"a worker ended with {how}; out of memory? {RESUME_HINT}, with fewer --workers")


def _progress(done: list[int], seconds: float, n: int, total: int) -> str:
    documents, tokens, n_bytes, parts = done
    share = n_bytes / total if total else parts / n
    left = f"{_time(seconds * (1 - share) / share)} left" if share else "time left unknown"
    return (
        f"{100 * share:5.1f} %  {documents:,} documents  {tokens / 1e6:,.1f} M tokens  "
        f"{tokens / seconds / 1e6:.2f} M tokens/s  {left}"
    )


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"

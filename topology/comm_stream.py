"""Background execution of multi-stage exchanges: on a CUDA stream, or on a thread if the tensors are on a CPU."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

HIGH_PRIORITY = -1  # of a CUDA stream; the default priority is 0
EXIT_SECONDS = 5.0  # an exit of the process waits so long for the exchanges in flight

Jobs = queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]


class Handle:
    """An exchange in flight. Call `wait()` before its result is read; a second call has no effect."""

    def __init__(self, wait: Callable[[], Any] | None = None, finish: Callable[[], Any] | None = None) -> None:
        self._wait, self._finish = wait, finish

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
        if self._finish is not None:
            self._finish()
        self._wait = self._finish = None


class CommStream:
    """Runs exchanges one after the other, in the order in which they are started.

    Every rank must start the same exchanges in the same order. The process groups of a stream are used by no other
    code, so its collectives match across ranks whatever other threads do. On a GPU an exchange is enqueued at once on
    a separate CUDA stream. On a CPU it runs on a thread, because gloo blocks between the stages.
    """

    def __init__(self) -> None:
        self._jobs: Jobs | None = None
        self._stream: torch.cuda.Stream | None = None

    def start(self, exchange: Callable[[], None], device: torch.device) -> Handle:
        """Start `exchange`. On a CPU its exceptions are raised by `Handle.wait`."""
        return self._on_stream(exchange, device) if device.type == "cuda" else self._on_thread(exchange)

    def _on_stream(self, exchange: Callable[[], None], device: torch.device) -> Handle:
        if self._stream is None:
            # High priority: communication kernels take free SMs before the packing kernels that run meanwhile.
            self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            exchange()
            done = stream.record_event()

        def wait(tensors: Callable[[], None] = exchange) -> None:
            # The default argument keeps the exchange and its tensors alive. Their memory belongs to the caller's
            # stream, so the allocator must not reuse it before that stream has waited.
            torch.cuda.current_stream(device).wait_event(done)

        return Handle(wait)

    def _on_thread(self, exchange: Callable[[], None]) -> Handle:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            # A daemon thread: an exchange that waits for a lost peer must not prevent the process from exiting.
            thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name="exchange", daemon=True)
            thread.start()
            weakref.finalize(self, _end, self._jobs, thread)  # also at the exit of the process
        done: Future[None] = Future()
        self._jobs.put((exchange, done))
        return Handle(done.result)


def _end(jobs: Jobs, thread: threading.Thread) -> None:
    """End a thread after its exchanges: the interpreter would end it inside one, which aborts the process."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(EXIT_SECONDS)


def _run_jobs(jobs: Jobs) -> None:
    torch.set_grad_enabled(False)
    while (job := jobs.get()) is not None:
        exchange, done = job
        try:
            exchange()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)
        del job, exchange, done  # otherwise these variables keep the tensors alive until the next exchange

"""Where exchanges of several stages run while their caller goes on: a thread on a CPU, a stream on a GPU."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

HIGH = -1  # priority of a stream; 0 is the usual one


class Handle:
    """An exchange in flight; `wait()` where its result is first needed. Waiting twice is allowed."""

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

    Every rank starts the same exchanges in the same order, and a lane has process groups that nobody else uses, so
    that its collectives match over the ranks whatever the calling threads do meanwhile. On a GPU an exchange is
    issued at once, on a stream of its own; on a CPU gloo blocks between the stages, so that a thread takes over.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], _Result]] | None = None
        self._stream: torch.cuda.Stream | None = None

    def start(self, exchange: Callable[[], None], device: torch.device) -> Handle:
        """Starts `exchange`. What it raises is raised where the handle is waited for."""
        return self._on_stream(exchange, device) if device.type == "cuda" else self._on_thread(exchange)

    def _on_stream(self, exchange: Callable[[], None], device: torch.device) -> Handle:
        if self._stream is None:
            # What is exchanged goes before what is packed meanwhile, in blocks that are free for either.
            self._stream = torch.cuda.Stream(device, priority=HIGH)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            exchange()
            done = stream.record_event()

        def wait(tensors: Callable[[], None] = exchange) -> None:
            # The handle keeps the exchange, and so its tensors: their memory belongs to the caller's stream, and must
            # not be used anew before that stream has waited.
            torch.cuda.current_stream(device).wait_event(done)

        return Handle(wait)

    def _on_thread(self, exchange: Callable[[], None]) -> Handle:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            # A daemon: a lane that hangs on a lost peer must not keep the process from ending.
            threading.Thread(target=_serve, args=(self._jobs,), name="exchange", daemon=True).start()
        result = _Result()
        self._jobs.put((exchange, result))
        return Handle(result.wait)


class _Result:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def set(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


def _serve(jobs: "queue.SimpleQueue[tuple[Callable[[], None], _Result]]") -> None:
    torch.set_grad_enabled(False)
    while True:
        exchange, result = jobs.get()
        try:
            exchange()
            error = None
        except BaseException as raised:
            error = raised
        result.set(error)
        del exchange, result, error  # else they would keep their tensors until the next exchange comes

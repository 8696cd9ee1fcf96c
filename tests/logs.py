"""Capture of log messages by a handler of the root logger."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the messages of all modules from level INFO inside the block."""
    root, collector = logging.getLogger(), _Collector()
    level = root.level
    root.addHandler(collector)
    root.setLevel(logging.INFO)
    try:
        yield collector.messages
    finally:
        root.removeHandler(collector)
        root.setLevel(level)

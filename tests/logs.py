"""Messages of a run, as a handler of the root logger gets them."""

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
    """The messages inside, of all modules, from level INFO."""
    root, collector = logging.getLogger(), _Collector()
    level = root.level
    root.addHandler(collector)
    root.setLevel(logging.INFO)
    try:
        yield collector.messages
    finally:
        root.removeHandler(collector)
        root.setLevel(level)

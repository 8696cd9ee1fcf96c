"""Values of other programs in the store of a run; two ranks are threads of this process."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from torchtitan_scape.runtime import liveness
from torchtitan_scape.runtime.listening import from_json, to_json
from torchtitan_scape.runtime.liveness import LOST, Failure, Liveness, Place


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dist.Store]]:
    """Return connections to one store; heartbeats come often."""
    monkeypatch.setattr(liveness, "INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(Liveness, "end", lambda self, failure: None)  # It would end this process.
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(served.port)}
    yield lambda: liveness._store(environment, timeout=5.0)
    del served


def wait_until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("key", ["beat/1", "failed"])
def test_a_lost_store_is_logged_while_steps_are_completed(
    key: str, connect: Callable[[], dist.Store], caplog: pytest.LogCaptureFixture
) -> None:
    """The store ends the connection of a rank that adds to a text; a rank stops to read it after another value."""
    connect().set(key, "text")
    one = Liveness(connect, 0, 2, "here:1")
    wait_until(lambda: one._store_lost_at is not None)
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            one.report_progress()
            time.sleep(0.05)
            if caplog.text:
                break
    assert "the store at here:1 no longer answers rank 0: the run continues, but" in caplog.text
    one.leave()


def test_records_keep_their_values() -> None:
    for record in (Failure(3, LOST, "rank 3 é"), Place("a.py:3 (f)", True)):
        assert from_json(type(record), to_json(record).encode()) == record
    for wrong in (json.dumps({"line": "a"}).encode(), b"5", b"\xff\xfe", b"[" * 100_000):
        with pytest.raises(ValueError, match="another program has written b'"):
            from_json(Place, wrong)

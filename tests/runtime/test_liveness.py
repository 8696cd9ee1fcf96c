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
from torchtitan_scape.runtime.liveness import LOST, WRONG_INPUT, Failure, Liveness, Place, failure_known


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


FOREIGN = (b"not JSON", b"[" * 100_000, b"\xff\xfe", b"5", b'{"rank": 0, "code": 0, "text": "completed"}', b"null")


@pytest.mark.parametrize("value", FOREIGN, ids=lambda value: value[:12].decode(errors="replace"))
def test_a_foreign_reason_is_ignored_and_a_rank_still_reports_its_own(
    value: bytes, connect: Callable[[], dist.Store], caplog: pytest.LogCaptureFixture
) -> None:
    other = connect()
    other.set("failed", value)
    known = failure_known("127.0.0.1", other.underlying_store.port)
    assert not known()
    ranks = [Liveness(connect, rank, 2) for rank in range(2)]
    other.set("failed", value)
    with caplog.at_level(logging.WARNING):
        wait_until(lambda: not other.get("failed"))
    other.set("place/0", value)
    ranks[1]._searching = True
    time.sleep(0.2)
    failure = Failure(1, WRONG_INPUT, "rank 1 stopped: no such file")
    ranks[1].report(failure)
    wait_until(lambda: ranks[0].failure == failure)
    assert known() and "that no rank wrote; it is ignored: b" in caplog.text
    for rank in ranks:
        rank.leave()


def test_a_lost_store_is_logged_while_steps_are_completed(
    connect: Callable[[], dist.Store], caplog: pytest.LogCaptureFixture
) -> None:
    """The store ends the connection of a rank that adds to a text."""
    connect().set("beat/1", "text")
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
    for wrong in ({"line": 5, "collective": True}, {"line": "a"}, {"line": "a", "collective": 1}, {}):
        with pytest.raises(ValueError, match=r"b'\{"):
            from_json(Place, json.dumps(wrong).encode())

"""Places of main threads in words."""

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from torchtitan_scape.runtime.liveness import Place, main_thread_place, places_in_words, stalled_rank

WAITING, READING = Place("topology/primitives.py:40 (all_reduce)", True), Place("data/loader.py:7 (read)", False)


def test_the_rank_outside_of_the_collective_is_named() -> None:
    assert stalled_rank({0: WAITING, 1: READING, 2: WAITING}, {1: "node7, process 5"}) == (
        1,
        "a collective timed out, and all ranks are alive; rank 1 (node7, process 5) in data/loader.py:7 (read) does "
        "not take part, 2 wait",
    )
    assert stalled_rank({0: WAITING, 1: WAITING}, {}) is None and stalled_rank({0: READING, 1: READING}, {}) is None
    assert stalled_rank({}, {}) is None
    found = stalled_rank(dict.fromkeys(range(6), READING) | {6: WAITING}, {})
    assert found is not None and found[0] == 0 and "and 2 more ranks do not" in found[1]


def test_places_are_grouped() -> None:
    many = dict.fromkeys(range(8), WAITING) | {3: READING}
    assert places_in_words(many) == (
        "rank 3 in data/loader.py:7 (read); rank 0, 1, 2, 4 and more in topology/primitives.py:40 (all_reduce)"
    )


def test_the_place_is_that_of_the_main_thread() -> None:
    found: list[Place] = []
    thread = threading.Thread(target=lambda: (time.sleep(0.2), found.append(main_thread_place())))
    thread.start()
    time.sleep(0.6)
    thread.join()
    assert "test_stalls.py:" in found[0].line and not found[0].collective
    place: list[Place] = []
    store = dist.HashStore()

    def barrier(rank: int) -> None:
        dist.distributed_c10d._store_based_barrier(rank, store, "x", 2, *(timedelta(seconds=60),) * 2)

    work = threading.Thread(target=lambda: (time.sleep(0.2), place.append(main_thread_place()), barrier(1)))
    work.start()
    barrier(0)
    work.join()
    assert place[0].collective and "distributed_c10d.py" in place[0].line

"""A check that all ranks make the calls that need all of them, such as those that save the state."""

import logging
import time
import zlib
from collections import Counter

import torch.distributed as dist

from torchtitan_scape.topology.collectives import ReplicaCollectives

SECONDS = 300.0  # the first rank waits so long for the others, which may be late
WARNING_SECONDS = 10.0  # after which it says that it waits

logger = logging.getLogger(__name__)

_CALLS: Counter[str] = Counter()  # of this process, by ranks and name


class JointCalls:
    """Notices a call of some ranks only, such as `if rank == 0: torch.save(optimizer.state_dict(), ...)`.

    Such a call would save the state of these ranks alone, or wait for the others until the group's timeout. The first
    rank waits on the host until all others have made the same call, and raises an error if they do not. The others do
    not wait, because the first one may be late: it often evaluates or writes alone before. Calls that load are not
    checked, because the ranks may have read files of different sizes before.

    Construction is collective.
    """

    def __init__(self, collectives: ReplicaCollectives) -> None:
        self._ranks: list[int] = []
        if dist.is_initialized() and not collectives.is_fake:
            self._ranks = sorted(set(collectives.gather_objects(dist.get_rank())))

    def expect(self, call: str, advice: str = "call it on every rank") -> None:
        """Check that all ranks make this call. It returns at once on all ranks but the first.

        Args:
            call: name of the function for the message.
            advice: the end of the message.

        Raises:
            ValueError: on the first rank, after `SECONDS` without the call of another one.
        """
        if len(self._ranks) < 2:
            return
        store = dist.distributed_c10d._get_default_store()
        key = f"torchtitan_scape/{zlib.crc32(repr(self._ranks).encode())}/{call}"
        numbered = f"{key}/{_CALLS[key]}"
        _CALLS[key] += 1
        arrived = store.add(numbered, 1)
        if dist.get_rank() != self._ranks[0]:
            return
        begin, warned = time.monotonic(), False
        while arrived < len(self._ranks) and (waited := time.monotonic() - begin) < SECONDS:
            if waited > WARNING_SECONDS and not warned:
                warned = True
                logger.warning(
                    f"{call}() was called on {arrived} of {len(self._ranks)} ranks; rank {self._ranks[0]} waits for "
                    f"the others, {SECONDS:.0f} s at most: {advice}"
                )
            time.sleep(0.005)
            arrived = store.add(numbered, 0)
        store.delete_key(numbered)
        if arrived < len(self._ranks):
            _CALLS[key] -= 1  # the others have not counted it
            raise ValueError(
                f"{call}() was called on {arrived} of {len(self._ranks)} ranks within {SECONDS:.0f} s, rank "
                f"{self._ranks[0]} among them; {advice}"
            )

"""Collectives in which some replicas own rows: real ranks against simulated replicas, messages against rows."""

import torch
import torch.distributed as dist
from torch import Tensor

from tests.pool import Pool
from tests.replicas import run_replicas
from torchtitan_scape.topology.collectives import ReplicaCollectives

OWNERS = (0, 2)


def rows_by_owner(collectives: ReplicaCollectives) -> tuple[Tensor, Tensor]:
    own = torch.arange(16.0).view(2, 8) * (collectives.replica + 1)
    handle, received = collectives.send_to_owners(own.view(torch.uint8), OWNERS)
    handle.wait()
    assert len(received) == (3 if collectives.replica in OWNERS else 0)
    mine = received.view(torch.float32).mean(0) if len(received) else own[0, :0]
    handle, gathered = collectives.gather_from_owners(mine.view(torch.uint8), 32, OWNERS)
    handle.wait()
    return gathered.view(torch.float32), torch.tensor(list(collectives.ledger.sent.values()))


def on_rank() -> tuple[Tensor, Tensor]:
    return rows_by_owner(ReplicaCollectives(dist.group.WORLD))


def test_rows_are_reduced_to_some_replicas_and_gathered_from_them(pool3: Pool) -> None:
    for real, simulated in zip(pool3(on_rank), run_replicas(3, rows_by_owner), strict=True):
        assert torch.equal(real[0], 2.0 * torch.arange(16.0).view(2, 8))
        assert torch.equal(real[0], simulated[0]) and torch.equal(real[1], simulated[1])

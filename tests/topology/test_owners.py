"""Collectives in which some replicas own rows: real ranks against simulated replicas, messages against rows."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.pool import Pool
from tests.replicas import run_replicas
from torchtitan_scape.kernels.codec.codes import BlockCode
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.process_groups import ProcessGroupCollectives

OWNERS = (0, 2)


def rows_by_owner(collectives: ReplicaCollectives) -> tuple[Tensor, Tensor]:
    own = torch.arange(16.0).view(2, 8) * (collectives.replica + 1)
    collectives.reduce_to_owners(own, OWNERS).wait()
    mine = own[OWNERS.index(collectives.replica)] if collectives.replica in OWNERS else own[0, :0]
    handle, gathered = collectives.gather_from_owners(mine, 8, OWNERS)
    handle.wait()
    return gathered.view(torch.float32), torch.tensor(list(collectives.ledger.sent.values()))


def on_rank() -> tuple[Tensor, Tensor]:
    return rows_by_owner(ProcessGroupCollectives(dist.group.WORLD))


def test_rows_are_reduced_to_some_replicas_and_gathered_from_them(pool3: Pool) -> None:
    for real, simulated in zip(pool3(on_rank), run_replicas(3, rows_by_owner), strict=True):
        assert torch.equal(real[0], 2.0 * torch.arange(16.0).view(2, 8))
        assert torch.equal(real[0], simulated[0]) and torch.equal(real[1], simulated[1])


def messages_by_owner(collectives: ReplicaCollectives, owners: tuple[int, ...]) -> None:
    """Compare the reduction of encoded rows with that of rows: result and ledger."""
    code, generator = BlockCode("2bit", 32), torch.Generator().manual_seed(collectives.replica)
    rows = torch.randn(len(owners), 64, generator=generator)
    messages, mean = code.encode(rows), torch.empty(64 if collectives.replica in owners else 0)
    collectives.reduce_messages_to_owners(messages, mean, owners, code).wait()
    sent = list(collectives.ledger.sent.values())
    collectives.reduce_to_owners(rows, owners, code).wait()
    if collectives.replica in owners:
        assert torch.equal(mean, rows[owners.index(collectives.replica)])
    assert [2 * each for each in sent] == list(collectives.ledger.sent.values())


def messages_on_rank(owners: tuple[int, ...]) -> None:
    messages_by_owner(ProcessGroupCollectives(dist.group.WORLD), owners)


@pytest.mark.parametrize("owners", [(0, 2), (0, 1, 2)])
def test_encoded_rows_are_reduced_as_rows(owners: tuple[int, ...], pool3: Pool) -> None:
    pool3(messages_on_rank, owners)
    run_replicas(3, functools.partial(messages_by_owner, owners=owners))

"""The optimizer in real gloo processes: plain tensors, and DTensors sharded by FSDP2."""

import itertools
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut

from tests.marks import covering, slow
from tests.pool import Pool
from tests.replica.own_loop import loss_of, make_model, make_optimizer, weights
from tests.toy import DENSE, SPARSE, draw, flat, gradient, literal, make_scape, positions, sum_gradients
from torchtitan_scape import AdamS
from torchtitan_scape.core.bf16_weights import hold_in_bfloat16
from torchtitan_scape.core.parameters import collect_shards, local
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.groups import build_groups
from torchtitan_scape.topology.in_process import collectives_of
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import get_machine
from torchtitan_scape.topology.partition import CHUNK_ENTRIES

STEPS = 8


def train_plain(**options: Any) -> dict[str, Any]:
    parameters = [nn.Parameter(p) for p in draw(0, SPARSE + DENSE)]
    optimizer = make_scape(parameters, lr=1e-2, block_size=16, replicas=dist.group.WORLD, **options)
    history = []
    for step in range(STEPS):
        for p, g in zip(parameters, gradient(step, dist.get_rank(), SPARSE + DENSE), strict=True):
            p.grad = g
        optimizer.step()
        history.append([p.detach().clone() for p in parameters])
    figures = optimizer.metrics()
    tensors = range(len(optimizer.method.passes.layout.sizes))
    on_mask = [optimizer.method.passes.kept()[i][positions(optimizer, i)] for i in tensors]
    optimizer.finish_previous_step()
    return {
        "history": history,
        "bits": optimizer.method.masks.in_use.bits,
        "figures": figures,
        "norm": optimizer.grad_norm,
        "before": [positions(optimizer, i).numel() for i in tensors],
        "moments": on_mask,
    }


@pytest.mark.parametrize(
    "world, selection, update, code",
    covering(
        [
            *itertools.product((2, 4), ("block", "tensor"), ("replicated", "sharded"), ("float32",)),
            (2, "block", "sharded", "int4"),
            (4, "block", "replicated", "2bit"),
        ]
    ),
)
def test_replicas_are_equal_and_follow_the_reference_algorithm(
    world: int, selection: str, update: str, code: str, request: pytest.FixtureRequest
) -> None:
    """Properties 3, 4 and 5 over gloo. With 4 replicas gloo sums in another order, hence the wider bound."""
    pool: Pool = request.getfixturevalue(f"pool{world}")
    options = {"density": 0.1, "selection": selection, "density_warmup_steps": 4, "update": update, "code": code}
    results = pool(train_plain, **options)
    for result in results[1:]:
        assert torch.equal(result["bits"], results[0]["bits"])
        assert torch.equal(result["norm"], results[0]["norm"])
        assert all(torch.equal(a, b) for a, b in zip(result["moments"], results[0]["moments"], strict=True))
        for mine, theirs in zip(result["history"], results[0]["history"], strict=True):
            assert torch.equal(flat(mine), flat(theirs))
    expected = literal(world, STEPS, chunk_entries=CHUNK_ENTRIES, **options)
    bound = 1e-6 if world == 2 and code == "float32" else 2e-5
    for got, want in zip(results[0]["history"], expected, strict=True):
        assert (flat(got) - flat(want)).norm() <= bound * flat(want).norm()
    figures = results[0]["figures"]
    assert figures == results[1]["figures"]
    assert figures["nnz"] == sum(results[0]["before"])
    assert 0 < figures["mask_overlap"] < 1 and figures["residual_norm"] > 0


class Net(nn.Module):
    """A net with odd sizes and uneven shards: 4 and 3 rows on 2 ranks, and an empty shard of the bias of size 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, reader: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + reader)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 1, generator=generator)


def train_sharded(replicate: int, shard: int, density: float) -> tuple[Tensor, list[float], int]:
    """Train with FSDP2 on the shard axis and SCAPE on the replicate axis."""
    world = dist.get_world_size()
    layout = plan_layout(world, ranks_per_node=world, machine=get_machine("local"), replicate=replicate, shard=shard)
    mesh = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
    model = make_net()
    fully_shard(model, mesh=mesh["shard"])
    sum_gradients(model)
    optimizer = make_scape(
        model.named_parameters(),
        lr=1e-2,
        density=density,
        block_size=8,
        reduction="sum",
        replicas=build_groups(layout, timedelta(seconds=60)),
    )
    norms = []
    for step in range(6):
        inputs, targets = batch(step, dist.get_rank())
        loss = ((model(inputs) - targets) ** 2).sum() / (4 * world)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm.item())
    full = flat([p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)])
    return full.detach(), norms, optimizer.guard.skipped


def train_dense_alone(world: int) -> tuple[Tensor, list[float]]:
    """Train with one process on the entire batch."""
    model = make_net()
    optimizer = AdamS(model.parameters(), lr=1e-2)
    norms = []
    for step in range(6):
        for reader in range(world):
            inputs, targets = batch(step, reader)
            (((model(inputs) - targets) ** 2).sum() / (4 * world)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return flat([p.detach() for p in model.parameters()]), norms


@pytest.mark.parametrize("replicate, shard", [(4, 1), (2, 2), (1, 4)])
def test_every_layout_of_four_ranks_is_dense_at_density_one(replicate: int, shard: int, pool4: Pool) -> None:
    """Property 1 over both axes, with one norm of the whole model."""
    expected, norms = train_dense_alone(4)
    for full, found, skipped in pool4(train_sharded, replicate, shard, 1.0):
        torch.testing.assert_close(full, expected, rtol=1e-4, atol=1e-6)
        assert found == pytest.approx(norms, rel=1e-4)
        assert skipped == 0


@pytest.mark.parametrize("replicate, shard", [slow(4, 1), (2, 2)])
def test_sparse_exchange_with_shards_keeps_replicas_equal(replicate: int, shard: int, pool4: Pool) -> None:
    results = pool4(train_sharded, replicate, shard, 0.25)
    for full, norms, _ in results[1:]:
        assert torch.equal(full, results[0][0]) and norms == results[0][1]
    assert bool(results[0][0].isfinite().all())


def train_by_group_alone() -> float:
    """Train with a plain ProcessGroup of replicas; the optimizer finds the shard group in the DTensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_net()
    fully_shard(model, mesh=mesh["shard"])
    optimizer = make_scape(model.named_parameters(), lr=1e-2, density=1.0, replicas=mesh["replicate"].get_group())
    for p in model.parameters():
        assert isinstance(p, DTensor)
        p.grad = DTensor.from_local(
            torch.ones_like(p.to_local()), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
        )
    optimizer.step()
    return optimizer.grad_norm.item()


def test_the_norm_includes_all_shards_with_a_plain_process_group(pool4: Pool) -> None:
    entries = sum(p.numel() for p in Net().parameters())
    assert pool4(train_by_group_alone) == pytest.approx([entries**0.5] * 4)


def chunk_of_a_large_payload(hierarchical: bool) -> int:
    """Return the chunk size on two nodes of two ranks. In a flat ring the link to the next rank differs by rank."""
    from torchtitan_scape.methods.scape.options import ScapeOptions

    layout = plan_layout(4, ranks_per_node=2, machine=get_machine("frontier"), replicate=4, shard=1)
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in nn.Linear(32768, 32768).parameters()]
    groups = build_groups(layout, timedelta(seconds=60), hierarchical)
    options = ScapeOptions(density=0.1).resolve_for_links(
        shapes, layout, dist.get_rank(), len(collectives_of(groups).levels)
    )
    return options.chunk_bytes


@pytest.mark.parametrize("hierarchical", [True, False])
def test_all_ranks_choose_the_same_chunk_size(hierarchical: bool, pool4: Pool) -> None:
    sizes = set(pool4(chunk_of_a_large_payload, hierarchical))
    assert len(sizes) == 1
    assert sizes.pop() < 0.1 * 4 * 32768**2, "more than one chunk"


def shards_as_replicas() -> None:
    model = make_net()
    fully_shard(model)
    make_scape(model.named_parameters(), lr=0.1, replicas=dist.group.WORLD)


def test_shards_given_as_replicas_are_refused(pool2: Pool) -> None:
    """A likely mistake: FSDP over all ranks, and the same ranks as replicas."""
    for good, text in pool2.outcomes(shards_as_replicas):
        assert not good and "ValueError: ranks [0, 1] are given as replicas" in text


def fsdp_on_weights_in_bf16() -> list[Tensor]:
    """Return loss and gradients with FSDP2's mixed precision, for FP32 weights and for the same weights in BF16."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for bf16_weights in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
        for p in net.parameters():
            p.data.copy_(p.data.bfloat16())
        fully_shard(net, mesh=mesh, mp_policy=policy)
        assert isinstance(net, FSDPModule)
        net.set_force_sum_reduction_for_comms(True)
        if bf16_weights:
            hold_in_bfloat16(net, scaled=True)
        for step in range(2):  # the second step gathers into the buffers of the first one
            loss = net(draw(step, [(5, 8)])[0]).float().square().sum()
            loss.backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())
        found.append(flat([loss.detach(), *(local(p.grad) for p in net.parameters() if p.grad is not None)]))
    with pytest.raises(ValueError, match=r"'weight' of shape \(5, 4\) has no even shards on"):
        hold_in_bfloat16(fully_shard(nn.Linear(4, 5, bias=False), mesh=mesh), scaled=True)
    return found


def test_fsdp_computes_with_bf16_weights_as_with_cast_fp32_weights(pool2: Pool) -> None:
    for wide, narrow in pool2(fsdp_on_weights_in_bf16):
        assert torch.equal(wide, narrow) and bool(wide.isfinite().all()) and bool(wide.any())


def cut_by_tensor_parallelism() -> str:
    """Return the error for a parameter that tensor parallelism cannot divide evenly; FSDP can."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    shards = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    cuts = [((6, 3), mesh, Cut(0)), ((3,), mesh, Replicate()), ((5, 3), shards, Cut(0)), ((4, 5), mesh, Cut(1))]
    parameters = [nn.Parameter(distribute_tensor(torch.ones(s), on, [cut])) for s, on, cut in cuts]
    assert len(collect_shards([{"params": parameters[:3]}])) == 3
    with pytest.raises(ValueError) as error:
        collect_shards([{"params": parameters, "param_names": ["a", "b", "c", "output.weight"]}])
    return str(error.value)


def test_uneven_tensor_parallel_shards_are_refused(pool2: Pool) -> None:
    said = r"tensor_parallel_degree = 2 does not divide dimension 1 of 'output.weight', \(4, 5\); choose one that does"
    assert all(re.search(said, message) for message in pool2(cut_by_tensor_parallelism))


def train_dense(together: bool, reduction: str, overlap: bool) -> dict[str, Any]:
    """Train with chunks in buffers, or in place as on a GPU."""
    kept = ReplicaCollectives.reduces_together
    ReplicaCollectives.reduces_together = lambda *_: together  # type: ignore[method-assign]
    try:
        model = make_model()
        optimizer = make_optimizer(model, "dense", reduction=reduction, overlap=overlap)
        for number in range(1, 4):
            optimizer.prepare_last_backward()
            loss_of(model, number, dist.get_rank()).backward()
            started = len(optimizer._overlap._in_flight) if overlap else 0
            optimizer.step()
            optimizer.zero_grad()
    finally:
        ReplicaCollectives.reduces_together = kept  # type: ignore[method-assign]
    return {"weights": weights(model), "bytes": optimizer.stats()["sent_bytes"], "started": started}


@pytest.mark.parametrize("reduction, overlap", [("mean", False), ("sum", False), ("mean", True)])
def test_dense_gradients_are_exchanged_in_place(reduction: str, overlap: bool, pool4: Pool) -> None:
    runs = (pool4(train_dense, together, reduction, overlap) for together in (True, False))
    for in_place, buffered in zip(*runs, strict=True):
        torch.testing.assert_close(in_place["weights"], buffered["weights"], rtol=1e-5, atol=1e-7)
        assert in_place["bytes"] == pytest.approx(buffered["bytes"], rel=1e-3)  # buffers are padded
        assert in_place["started"] == buffered["started"] == int(overlap)  # a small model is one chunk

"""Hierarchical collectives in gloo processes: equal on all ranks, exact up to the returned error, counted correctly."""

from datetime import timedelta
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import pad

from tests.pool import Pool
from torchtitan_scape.kernels.codec.reference import BlockCode
from torchtitan_scape.topology import collectives as endpoints
from torchtitan_scape.topology import stages
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.groups import build_groups
from torchtitan_scape.topology.in_process import DryRunCollectives, SimulatedReplicas
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import get_machine
from torchtitan_scape.topology.stages import Codec, message_size
from torchtitan_scape.topology.traffic import TrafficLedger, reduce_scatter_stages

# A machine with three levels.
THREE = get_machine("frontier")
# (ranks per node, hierarchical) of four ranks
SHAPES = {"flat": (4, False), "one": (1, True), "pairs": (4, True), "nodes": (2, True)}
LEVEL_SIZES = {"flat": (4,), "one": (4,), "pairs": (2, 2), "nodes": (2, 2)}
CODECS: dict[str, Codec | None] = {
    "float32": None,
    **{name: BlockCode(name, 32) for name in ("int8", "int4", "2bit")},
}


def collectives(shape: str) -> ReplicaCollectives:
    ranks_per_node, hierarchical = SHAPES[shape]
    world = dist.get_world_size()
    layout = plan_layout(world, ranks_per_node=ranks_per_node, machine=THREE, replicate=world, shard=1)
    return ReplicaCollectives(build_groups(layout, timedelta(seconds=60), hierarchical))


def values(rank: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))


def padded(n: int, name: str, replicas: int) -> int:
    """Round n up to the size that an exchange with this codec requires."""
    codec = CODECS[name]
    multiple = replicas * (codec.block_size if codec else 4)
    return -(-n // multiple) * multiple


def exchange(shape: str) -> dict[str, dict[str, Any]]:
    """Run collectives with every codec: concurrent all-reduces and an all-gather, then a reduce-scatter and all-gather.

    Records the input sizes of the intercepted calls of torch.distributed.
    """
    ours, rank = collectives(shape), dist.get_rank()
    intercepted: list[int] = []

    def spied(function: Any, argument: int) -> Any:
        def spy(*args: Any, **kwargs: Any) -> Any:
            intercepted.append(args[argument].nbytes)
            return function(*args, **kwargs)

        return spy

    gather = spied(stages.all_gather_into, 1)
    spies = [
        patch.object(dist, "all_reduce", spied(dist.all_reduce, 0)),
        patch.object(dist, "all_to_all_single", spied(dist.all_to_all_single, 1)),
        patch.object(stages, "all_gather_into", gather),
        patch.object(endpoints, "all_gather_into", gather),
    ]
    for spy in spies:
        spy.start()
    results = {}
    for name, codec in CODECS.items():
        n = padded(64, name, ours.replicas)
        ours.ledger, before = TrafficLedger(), len(intercepted)
        chunks = [values(10 * i + rank, n) for i in range(3)]
        # The errors of the last one are discarded.
        errors = [torch.full((n,), torch.nan) if codec and i < 2 else None for i in range(3)]
        handles = [ours.all_reduce(c, codec=codec, error=e) for c, e in zip(chunks, errors, strict=True)]
        gathered = torch.zeros(ours.replicas * 16, dtype=torch.uint8)
        handles.append(ours.all_gather(gathered, torch.full((16,), rank, dtype=torch.uint8)))
        for handle in handles:
            handle.wait()
        reduced = ours.ledger
        ours.ledger = TrafficLedger()
        part, error = values(rank, n), torch.full((n,), torch.nan) if codec else None
        ours.reduce_scatter(part, codec=codec, error=error).wait()
        own = part.view(ours.replicas, -1)[ours.replica].clone()
        ours.all_gather(part, own, kind="values").wait()
        results[name] = {
            "replica": ours.replica,
            "chunks": chunks,
            "errors": errors[:2],
            "gathered": gathered.tolist(),
            "scattered": part,
            "scatter_error": error,
            "intercepted": sum(intercepted[before:]),
            "input_bytes": sum(reduced.input_bytes.values()) + sum(ours.ledger.input_bytes.values()),
            "sent": by_level(reduced, "payload"),
            "masks": by_level(reduced, "mask"),
            "scatter_sent": by_level(ours.ledger, "payload"),
            "values_sent": by_level(ours.ledger, "values"),
            "planned": [
                3 * ours.reduced_bytes(n, codec),
                sum(s.sent for s in reduce_scatter_stages(n, ours.levels, message_size(codec))),
                ours.gathered_bytes(4 * own.numel()),
            ],
        }
        if codec is not None:
            results[name]["carried_error"] = reduce_with_carried_error(ours, rank, n, codec)
    for spy in spies:
        spy.stop()
    return results


def reduce_with_carried_error(ours: ReplicaCollectives, rank: int, n: int, codec: Codec) -> tuple[torch.Tensor, ...]:
    """All-reduce with a carried error. Returns the carried error before and after, the mean, and the error."""
    mean, error = values(rank, n), torch.full((n,), torch.nan)
    before = values(100 + rank, n // ours.replicas)
    after = before.clone()
    ours.all_reduce(mean, codec=codec, error=error, carried_error=after).wait()
    return before, after, mean, error


def by_level(ledger: TrafficLedger, kind: str) -> dict[str, float]:
    return {level: ledger.sent["replicate", level, kind] for level in ("gcd_pair", "node", "network")}


@cache
def exchanged(shape: str) -> list[dict[str, dict[str, Any]]]:
    """Return the results of `exchange` of four ranks, in replica order."""
    results = Pool(4)(exchange, shape)
    return sorted(results, key=lambda result: result["float32"]["replica"])


def plain(x: torch.Tensor, sizes: tuple[int, ...], codec: Codec, back: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (mean, errors) of x, FP32 (replicas, n), message by message, over levels of `sizes`, innermost first.

    back: the mean is encoded too, as in an all-reduce; otherwise this is a reduce-scatter.
    """
    *inner, outer = sizes
    replicas, n = x.shape
    errors = torch.zeros_like(x)
    sums = x.view(*sizes, n)
    for _ in inner:
        sums = sum(sums)  # type: ignore[assignment]
    result, m = torch.empty(n), n // replicas

    def decoded(values: torch.Tensor) -> torch.Tensor:
        values = values.view(1, -1)
        out = torch.empty_like(values)
        codec.decode(codec.encode(values), out)
        return out.view(-1)

    for owner in range(replicas):  # owner of slice `owner`, which receives it from its outermost group
        first, part = owner // outer * outer, slice(owner * m, (owner + 1) * m)
        total = torch.zeros(m)
        for member in range(outer):
            given = sums[member][part]
            received = decoded(given)
            errors[first + member][part] = given - received
            total += received
        mean = total / replicas
        result[part] = decoded(mean) if back else mean
        if back:
            errors[owner][part] += (mean - result[part]) * replicas
    return result, errors


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_ranks_have_the_same_mean_and_errors_are_exact(shape: str, name: str) -> None:
    check_exchange([result[name] for result in exchanged(shape)], name, LEVEL_SIZES[shape])


def check_exchange(results: list[dict[str, Any]], name: str, sizes: tuple[int, ...]) -> None:
    codec, world = CODECS[name], len(results)
    assert [r["replica"] for r in results] == list(range(world))
    for result in results:
        for mine, theirs in zip(result["chunks"], results[0]["chunks"], strict=True):
            assert torch.equal(mine, theirs)
        assert result["gathered"] == results[0]["gathered"]
        assert torch.equal(result["scattered"], results[0]["scattered"])
    ranks = results[0]["gathered"][::16]  # in replica order
    assert sorted(ranks) == list(range(world)) and results[0]["gathered"] == [r for r in ranks for _ in range(16)]
    means, seeds = [*results[0]["chunks"], results[0]["scattered"]], (0, 10, 20, 0)
    for i, (mean, seed) in enumerate(zip(means, seeds, strict=True)):
        given = torch.stack([values(seed + rank, mean.numel()) for rank in ranks])
        total, back = given.double().sum(0), i < 3
        if codec is not None:
            expected, lost = plain(given, sizes, codec, back)
            assert torch.equal(mean, expected)
            found = [r["errors"][i] if back else r["scatter_error"] for r in results] if i != 2 else lost
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, lost, strict=True))
            total -= sum(error.double() for error in found)
        torch.testing.assert_close(mean.double(), total / world, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if codec])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_carried_error_is_added_to_the_next_mean(shape: str, name: str) -> None:
    """It is added to the next mean, and is not part of the replica's error."""
    codec, results = CODECS[name], [result[name] for result in exchanged(shape)]
    assert codec is not None
    given = torch.stack([values(rank, len(results[0]["scattered"])) for rank in results[0]["gathered"][::16]])
    received, lost = plain(given, LEVEL_SIZES[shape], codec, back=False)
    for part, result, own in zip(received.view(len(results), -1), results, lost, strict=True):
        before, after, mean, error = result["carried_error"]
        assert torch.equal(mean, results[0]["carried_error"][2]) and torch.equal(error, own)
        wanted = (part + before).view(1, -1)
        decoded = torch.empty_like(wanted)
        codec.decode(codec.encode(wanted), decoded)
        assert torch.equal(mean.view(len(results), -1)[result["replica"]], decoded.view(-1))
        torch.testing.assert_close(decoded.view(-1) + after, wanted.view(-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_counted_bytes_are_the_inputs_of_collectives(shape: str, name: str) -> None:
    check_bytes([result[name] for result in exchanged(shape)])


def check_bytes(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["input_bytes"] == result["intercepted"]
        counted = [sum(result[kind].values()) for kind in ("sent", "scatter_sent", "values_sent")]
        assert counted == result["planned"]


def bytes_of(name: str, entries: int) -> int:
    """Return the bytes of a message: FP32, or codes with one or two BF16 scales per 32 entries, padded to 16."""
    if name == "float32":
        return 4 * entries
    size = entries * {"int8": 8, "int4": 4, "2bit": 2}[name] // 8 + entries // 32 * (4 if name == "2bit" else 2)
    return -(-size // 16) * 16


@pytest.mark.parametrize("name", CODECS)
def test_each_byte_crosses_the_network_once_per_node(name: str) -> None:
    """Two nodes of two ranks: n entries cross a node's NIC, compared with 1.5 n for a flat ring."""
    n = padded(64, name, 4)
    message = bytes_of(name, n // 4)
    for result in (results[name] for results in exchanged("nodes")):
        # Half of the entries in FP32, a message to the other node and one back, both messages to the other rank.
        assert result["sent"] == {"gcd_pair": 3 * (2 * n + 2 * message), "node": 0, "network": 3 * 2 * message}
        assert result["masks"] == {"gcd_pair": 2 * 16, "node": 0, "network": 16}
        assert result["scatter_sent"] == {"gcd_pair": 2 * n, "node": 0, "network": message}
        assert result["values_sent"] == {"gcd_pair": 2 * n, "node": 0, "network": n}
    for result in (results[name] for results in exchanged("pairs")):  # one node: two levels inside it
        assert result["sent"] == {"gcd_pair": 3 * (2 * n + 2 * message), "node": 3 * 2 * message, "network": 0}
    for result in (results[name] for results in exchanged("one")):
        assert result["sent"] == {"gcd_pair": 0, "node": 0, "network": 3 * 6 * message}
        assert result["scatter_sent"] == {"gcd_pair": 0, "node": 0, "network": 3 * message}


def test_three_levels() -> None:
    """Eight ranks: pairs, two pairs per node, two nodes."""
    everything = sorted(Pool(8)(exchange, "pairs"), key=lambda result: result["float32"]["replica"])
    for name in CODECS:
        results, n = [result[name] for result in everything], padded(64, name, 8)
        check_exchange(results, name, (2, 2, 2))
        check_bytes(results)
        message = bytes_of(name, n // 8)
        for result in results:
            assert result["masks"] == {"network": 16, "node": 32, "gcd_pair": 64}
            assert result["sent"] == {
                "gcd_pair": 3 * (2 * n + 4 * message),
                "node": 3 * (n + 2 * message),
                "network": 3 * 2 * message,
            }


@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if codec])
def test_simulated_replicas_equal_one_level(name: str) -> None:
    """Bitwise, errors included, whether they are returned or discarded."""
    codec, simulated = CODECS[name], SimulatedReplicas(4)
    results = [result[name] for result in exchanged("one")]
    rank_of = results[0]["gathered"][::16]

    def work(replica: int) -> None:
        ours, theirs, n = simulated.endpoints[replica], results[replica], padded(64, name, 4)
        for i, error in enumerate((torch.full((n,), torch.nan), None)):
            mean = values(rank_of[replica], n)
            ours.all_reduce(mean, codec=codec, error=error).wait()
            assert torch.equal(mean, theirs["chunks"][0])
            assert error is None or torch.equal(error, theirs["errors"][0])
            part = values(rank_of[replica], n)
            ours.reduce_scatter(part, codec=codec, error=error).wait()
            own = slice(replica * n // 4, (replica + 1) * n // 4)
            assert torch.equal(part[own], theirs["scattered"][own])
            assert error is None or torch.equal(error, theirs["scatter_error"])
            assert ours.ledger.sent["replicate", "network", "payload"] == (i + 1) * sum(
                theirs[kind]["network"] / (3 if kind == "sent" else 1) for kind in ("sent", "scatter_sent")
            )
        found = reduce_with_carried_error(ours, rank_of[replica], n, codec)
        assert all(torch.equal(mine, other) for mine, other in zip(found, theirs["carried_error"], strict=True))

    simulated.run(work)


def test_incomplete_blocks_are_refused() -> None:
    """The caller pads tensors; blocks are never divided between messages."""
    ours, codec = DryRunCollectives(replicas=4), CODECS["int4"]
    assert ours.size_multiple(codec) == 128 and ours.size_multiple() == 4
    for exchange_ in (ours.all_reduce, ours.reduce_scatter):
        exchange_(torch.zeros(256), codec=codec)
        with pytest.raises(AssertionError):
            exchange_(torch.zeros(192), codec=codec)


def fail_on_a_comm_stream() -> str:
    ours = collectives("nodes")
    with patch.object(stages, "all_gather_into", side_effect=RuntimeError("lost")):
        handle = ours.all_reduce(torch.zeros(16))
        try:
            handle.wait()
        except RuntimeError as error:
            return str(error)
    return "nothing raised"


def test_an_error_of_an_exchange_is_raised_by_wait(pool4: Pool) -> None:
    assert pool4(fail_on_a_comm_stream) == ["lost"] * 4


def reduce_uneven(shape: str, name: str) -> list[torch.Tensor]:
    tensors = [values(dist.get_rank(), n) for n in (7, 0, 30, 1)]
    ours = collectives(shape)
    ours.chunk_entries = 16
    ours.all_reduce_chunked(tensors, codec=CODECS[name])
    return tensors


@pytest.mark.parametrize("shape, name", [("nodes", "float32"), ("pairs", "float32"), ("nodes", "int4")])
def test_uneven_sizes(shape: str, name: str, pool4: Pool) -> None:
    results, codec = pool4(reduce_uneven, shape, name), CODECS[name]
    means = [sum(values(rank, n) for rank in range(4)) / 4 for n in (7, 0, 30, 1)]
    if codec is not None:  # chunk by chunk, each padded with zeros; the second rank of a node is replica 2
        given = torch.stack([torch.cat([values(rank, n) for n in (7, 0, 30, 1)]) for rank in (0, 2, 1, 3)])
        chunks = [
            plain(pad(chunk, (0, 128 - chunk.shape[1])), (2, 2), codec, True)[0][: chunk.shape[1]]
            for chunk in given.split(16, 1)
        ]
        means = list(torch.cat(chunks).split((7, 0, 30, 1)))
    for i, expected in enumerate(means):
        for result in results:
            torch.testing.assert_close(result[i], expected)
            assert torch.equal(result[i], results[0][i])
            assert codec is None or torch.equal(result[i], expected)


def all_reduce_bits(shape: str) -> tuple[torch.Tensor, dict[str, float], float]:
    ours = collectives(shape)
    generator = torch.Generator().manual_seed(dist.get_rank())
    bits = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=generator)
    ours.all_reduce_or(bits, kind="index").wait()
    return bits, by_level(ours.ledger, "index"), ours.reduced_bytes(16)


@pytest.mark.parametrize("shape", ["one", "nodes"])
def test_bitwise_or(shape: str, pool4: Pool) -> None:
    """On all ranks; as many bytes are sent as in an all-reduce of the same size."""
    own = [
        torch.randint(0, 256, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))
        for rank in range(4)
    ]
    expected = own[0] | own[1] | own[2] | own[3]
    for bits, sent, planned in pool4(all_reduce_bits, shape):
        assert torch.equal(bits, expected) and sum(sent.values()) == planned == 96.0
        assert sent["network"] == (96.0 if shape == "one" else 32.0)

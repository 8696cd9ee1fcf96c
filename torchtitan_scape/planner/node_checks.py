"""Measurements that find a slow node, pair of nodes or device among the running ranks."""

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchtitan_scape.topology.groups import gather_lists

PAIR_BYTES = 1 << 25  # on GPUs; a sixteenth on CPUs
MAX_ROUNDS = 63  # with more than 64 nodes, every node exchanges with this many others
PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}
REPEATS = 5


def clock_offsets(group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the seconds by which each rank's clock is ahead of that of rank 0, to within a barrier's duration.

    Collective. `group`: All ranks, on the host.
    """
    samples = []
    for _ in range(REPEATS):
        dist.barrier(group)
        times = gather_lists(group or dist.group.WORLD, [time.time()])
        samples.append([own - times[0] for own in times])
    return [min(offsets, key=abs) for offsets in zip(*samples, strict=True)]


def rounds_of(nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which every node is in at most one pair, and all pairs of nodes occur once (circle method)."""
    players = list(range(nodes + nodes % 2))
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < nodes])
        players.insert(1, players.pop())
    return rounds[:MAX_ROUNDS]


def pair_bandwidths(nodes: Sequence[Sequence[int]], device: torch.device) -> dict[tuple[int, int], float]:
    """Return the bytes/s that two nodes exchange, in one direction, by pair of indices in `nodes`. Collective.

    Rank i of a node exchanges with rank i of the other, all at the same time, and so do the other pairs of the round.

    Args:
        nodes: Ranks of each node.
        device: Device of the messages.
    """
    rank = dist.get_rank()
    nbytes = PAIR_BYTES if device.type == "cuda" else PAIR_BYTES // 16
    sent, received = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    own = {
        pair: own_seconds
        for pairs in rounds_of(len(nodes))
        for pair, peer in [_own_pair(pairs, nodes, rank)]
        if (own_seconds := _exchange_seconds(peer, sent, received)) is not None and pair is not None
    }
    gathered: list[dict[tuple[int, int], float]] = gather_lists(dist.group.WORLD, [own])
    bandwidths = {}
    for pair in {pair for seconds in gathered for pair in seconds}:
        ranks = min(len(nodes[pair[0]]), len(nodes[pair[1]]))
        bandwidths[pair] = ranks * nbytes / max(seconds.get(pair, 0.0) for seconds in gathered)
    return bandwidths


def _own_pair(
    pairs: list[tuple[int, int]], nodes: Sequence[Sequence[int]], rank: int
) -> tuple[tuple[int, int] | None, int]:
    """Return this rank's pair of nodes in a round and its peer; None and -1 if it has none."""
    for pair in pairs:
        for one, other in (pair, reversed(pair)):
            if rank in nodes[one] and (index := nodes[one].index(rank)) < len(nodes[other]):
                return pair, nodes[other][index]
    return None, -1


def _exchange_seconds(peer: int, sent: torch.Tensor, received: torch.Tensor) -> float | None:
    """Return the shortest time of an exchange with `peer`, or None for -1. All ranks call it together."""
    times = []
    for repeat in range(1 + REPEATS):  # the first one connects
        _synchronize(sent.device)
        dist.barrier()
        begin = time.perf_counter()
        if peer >= 0:
            operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            _synchronize(sent.device)
            if repeat:
                times.append(time.perf_counter() - begin)
    return min(times, default=None)


def product_rates(device: torch.device) -> list[float]:
    """Return each rank's operations/s in a product of square matrices, BF16 on GPUs, FP32 on CPUs. Collective.

    All ranks compute at the same time, as in training.
    """
    n = PRODUCT_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    times, calls = [], 10
    for repeat in range(1 + REPEATS):
        dist.barrier()
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            torch.mm(a, b)
        _synchronize(device)
        if repeat:
            times.append((time.perf_counter() - begin) / calls)
    return gather_lists(dist.group.WORLD, [2 * n**3 / statistics.median(times)])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

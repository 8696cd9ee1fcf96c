"""Checks for damaged tensors: replicas that differ, and values that no training produces.

Each replica updates the replicated tensors by itself. A flipped bit in memory, or a faulty computation, makes one
replica diverge permanently without a visible effect on the loss. Each rank therefore periodically hashes the tensors
that must be equal over the replicate axis, bit for bit, and compares eight bytes with its peers.

Per-replica state cannot be compared: residuals, rounding errors, and in the sharded form an owner's moments and master.
The moment that all replicas share on the mask is not hashed either, to avoid reading the state. If it is wrong and
used, parameters differ one step later.

A flipped exponent bit multiplies a weight by a power of two. The loss may then stay finite, near the logarithm of the
vocabulary, with zero gradients. With weights of single replicas only the check for plausible values finds it.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_scape.kernels.scape.reference import unpack_bits
from torchtitan_scape.topology.collectives import ReplicaCollectives

logger = logging.getLogger(__name__)

LARGEST = 2.0**20  # absolute value that no parameter of a trained model reaches
_LARGEST_DRIFT = 10.0  # distance to the shared weights, relative to the tensor's largest entry
# Columns of the hash. A prime, so that entries whole matrix rows apart do not fall into the same column.
_COLUMNS = 1021
# Bytes hashed at a time; tensors on the host, and tensors not aligned to 64 bits, are copied in chunks of this size.
_CHUNK_BYTES = 1 << 26
# Odd multipliers, as signed 64-bit integers.
_ODD, _FACTOR = 0x9E3779B97F4A7C15 - (1 << 64), 0xD6E8FEB86659FD93 - (1 << 64)


class ReplicasDifferError(RuntimeError):
    """Replicated tensors differ between replicas."""

    exit_code = 3  # Exit code of the process: a restart from the last checkpoint helps.


@dataclass(frozen=True)
class ReplicatedTensors:
    """Replicated tensors of one parameter, or of all parameters together (`name` is None).

    Attributes:
        parts: (kind, tensor) of any dtype and shape, on the host if offloaded; the kind None is the parameter itself.
        on_mask: (FP32 (n,), packed bits, or None for all ones): state that is replicated where the bits are set.
    """

    name: str | None
    parts: list[tuple[str | None, Tensor]]
    on_mask: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)


# -------------------------------------------------------------------------------------------------- hashes


def fingerprints(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return hashes of tensors, int64 (tensors,), on `device`; any single flipped bit changes the hash.

    The tensors are read once. 64-bit words are summed per column as integers, so the order of summation does not
    matter. The sums are then mixed by a bijective function, so no change of a single sum is lost. Swapped words change
    the hash, unless they are a multiple of `_COLUMNS` words apart.
    """
    sums: list[Tensor] = []
    chunk_ids: list[tuple[int, int]] = []  # (tensor, chunk of it)
    for number, tensor in enumerate(tensors):
        data = tensor.detach().reshape(-1).view(torch.uint8)
        for index, chunk in enumerate(data.split(_CHUNK_BYTES)):
            chunk = chunk.to(device, non_blocking=True)
            if chunk.numel() % 8 or chunk.storage_offset() % 8:
                chunk = torch.nn.functional.pad(chunk.clone(), (0, -chunk.numel() % 8))
            sums.append(_column_sums(chunk.view(torch.int64)))
            chunk_ids.append((number, index))
    numbers, chunks = torch.tensor(chunk_ids, dtype=torch.int64, device=device).unbind(1)
    of_chunks = _mixed(_numbered(torch.stack(sums))).sum(1)
    hashes = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    return hashes.index_add_(0, numbers, _mixed(of_chunks + chunks * _ODD))


def combined(hashes: Tensor) -> Tensor:
    """Return one hash, int64 (1,), of hashes int64 (n,); a change of any one of them changes it."""
    return _mixed(_numbered(hashes)).sum().view(1)


def _column_sums(words: Tensor) -> Tensor:
    """Return the column sums, int64 (_COLUMNS,), of int64 (n,)."""
    rows = words.numel() // _COLUMNS
    sums = words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0)
    rest = words[rows * _COLUMNS :]
    sums[: rest.numel()] += rest
    return sums


def _numbered(values: Tensor) -> Tensor:
    """Make equal values in different columns different."""
    return values + torch.arange(1, values.shape[-1] + 1, device=values.device) * _ODD


def _mixed(values: Tensor) -> Tensor:
    """Apply a bijective function, int64 to int64, so that sums of the result depend on all bits."""
    for _ in range(2):
        values = values ^ (values >> 32 & 0xFFFFFFFF)  # A logical shift.
        values = values * _FACTOR
    return values ^ (values >> 32 & 0xFFFFFFFF)


# ---------------------------------------------------------------------------------------------------- check


@dataclass(frozen=True)
class _Mismatch:
    """Peers that disagree on some parts: those unlike the majority, and one of it; all and None without one."""

    shared: ReplicatedTensors
    odd: tuple[int, ...]
    source: int | None
    parts: tuple[int, ...]

    @property
    def description(self) -> str:
        kind = self.shared.parts[self.parts[0]][0]
        name = repr(self.shared.name) if self.shared.name else ""
        return " of ".join(text for text in (kind, name) if text)


@torch.no_grad()
def check_replicas_equal(
    collectives: ReplicaCollectives, shared: Sequence[ReplicatedTensors], device: torch.device, step: int, repair: bool
) -> bool:
    """Compare replicated tensors over all replicas. Collective; all ranks of all replicas get the same result.

    Waits for the device. Bytes are not counted: eight per peer, unless something differs. With `repair`, tensors that
    deviate are overwritten by those of the majority. Returns whether nothing had to be repaired.

    Raises:
        ReplicasDifferError: Names ranks and parameters. Raised without `repair`, without a majority, and if replicas
            differ again directly after a repair.
    """
    if not any(one.parts for one in shared):  # every replica has its own values only
        return True
    hashes = fingerprints([tensor for one in shared for _, tensor in one.parts], device)
    all_hashes = collectives.gather_from_peers(combined(hashes))
    # Ranks that hold other shards take part in the following collectives.
    if not collectives.sum_over_all((all_hashes != all_hashes[0]).any().double()).item():
        return True
    peers, group_rank = collectives.peers
    findings = _findings(shared, collectives.gather_from_peers(hashes).tolist())
    report = (_texts(findings, peers), all(finding.source is not None for finding in findings))
    reports = collectives.gather_objects(report)
    texts = list(dict.fromkeys(text for rank_texts, _ in reports for text in rank_texts))
    message = f"step {step}: " + "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")
    if not repair or not all(good for _, good in reports):
        raise ReplicasDifferError(
            f"{message}: replicas must be bitwise equal, so memory or a computation has failed there, or weights were "
            "loaded or changed on some ranks only (load them on every rank)"
            + (" (on_inconsistency = 'repair' needs a majority)" if repair else "")
            + ". Checkpoints of the trainer and of replicate() are checked: the last one is valid, restart from it"
        )
    for finding in findings:
        _repair(finding, collectives, device, group_rank)
    try:
        check_replicas_equal(collectives, shared, device, step, False)
    except ReplicasDifferError as error:
        raise ReplicasDifferError(f"after a repair at {error}") from None
    logger.warning(f"{message}: overwritten by the values of the majority")
    return False


def _findings(shared: Sequence[ReplicatedTensors], hashes: list[list[int]]) -> list[_Mismatch]:
    """Return the mismatches, from the hashes of all parts, one row per peer."""
    mismatches, first = [], 0
    for one in shared:
        rows = [tuple(row[first : first + len(one.parts)]) for row in hashes]
        first += len(one.parts)
        if len(set(rows)) == 1:
            continue
        most, count = Counter(rows).most_common(1)[0]
        source = rows.index(most) if 2 * count > len(rows) else None
        odd = tuple(i for i, row in enumerate(rows) if source is None or row != most)
        parts = tuple(i for i, values in enumerate(zip(*rows, strict=True)) if len(set(values)) > 1)
        mismatches.append(_Mismatch(one, odd, source, parts))
    return mismatches


def _texts(findings: Sequence[_Mismatch], peers: list[int]) -> list[str]:
    """Return one text per group of ranks that deviate in the same parameters."""
    by_ranks: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for finding in findings:
        by_ranks.setdefault((finding.odd, finding.source is None), []).append(finding.description)
    texts = []
    for (odd, undecided), names in by_ranks.items():
        description = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        if undecided:
            texts.append(f"{_ranks([peers[i] for i in odd])} differ in {description} without a majority")
            continue
        others = _ranks([rank for i, rank in enumerate(peers) if i not in odd])
        ranks = _ranks([peers[i] for i in odd])
        verb = "differs" if len(names) == 1 else "differ"
        texts.append(ranks + ("'s " if len(odd) == 1 else ": ") + f"{description} {verb} from {others}")
    return texts


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {ranks[0]}, {ranks[1]} and {len(ranks) - 2} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _repair(finding: _Mismatch, collectives: ReplicaCollectives, device: torch.device, group_rank: int) -> None:
    """Overwrite the deviating parts, and the state where it is replicated, from the source; residuals stay."""
    source, is_odd = finding.source, group_rank in finding.odd
    assert source is not None
    for number in finding.parts:
        tensor = finding.shared.parts[number][1].detach()
        # A copy, because a collective does not count as a change of a tensor (`Tensor._version`).
        values = tensor.to(device, copy=True).contiguous()
        collectives.broadcast(values, source)
        if is_odd:
            tensor.copy_(values)
    for state, bits in finding.shared.on_mask:
        received = state.to(device, copy=True)
        collectives.broadcast(received, source)
        if is_odd and bits is not None:
            received = torch.where(unpack_bits(bits, state.numel()), received, state.to(device))
        if is_odd:
            state.copy_(received)


# ----------------------------------------------------------------------------------------------------- plausible values


class DamagedParametersError(RuntimeError):
    """A parameter, or a state of the optimizer or the method, has values that no training produces."""

    exit_code = 3  # Exit code of the process: a restart from the last checkpoint helps.


def is_plausible(values: Tensor, shared: Tensor | None = None, largest: Tensor | float = LARGEST) -> Tensor:
    """Return bool () on the device: whether all values are finite and smaller than `largest`, also relative to
    `shared`.

    Those are the weights that all replicas share, if the replicas' weights differ. They may be on the host.
    """
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    plausible = _largest_magnitude(values) < largest  # false for NaN
    if shared is None:
        return plausible
    shared = shared.to(values.device).view(values.shape)
    largest_shared = _largest_magnitude(shared)
    drift = _largest_magnitude(values - shared)
    return plausible & (largest_shared < LARGEST) & (drift < torch.clamp(_LARGEST_DRIFT * largest_shared, min=1.0))


def _largest_magnitude(values: Tensor) -> Tensor:
    """Return the largest absolute value, FP32 (); NaN if there is one."""
    low, high = values.aminmax()
    return torch.maximum(-low, high).float()


def check_plausible(
    tensors: Iterable[tuple[str, Tensor]], collectives: ReplicaCollectives, step: int, what: str = "parameters"
) -> None:
    """Check the results of `is_plausible` of this process, with their descriptions. Collective; waits for the device.

    `what` is all of them, in the message. Raises DamagedParametersError on every rank, with ranks and parameters.
    """
    if collectives.is_fake:
        return
    names, flags = zip(*tensors, strict=True)
    plausible = torch.stack([flag.to(flags[0].device) for flag in flags])
    if not collectives.sum_over_all((~plausible).sum().float()).item():
        return
    damaged = [name for name, good in zip(names, plausible.tolist(), strict=True) if not good]
    rank = dist.get_rank() if dist.is_initialized() else 0
    raise DamagedParametersError(
        f"{what} are damaged at step {step}: {ranks_text(collectives.gather_objects((rank, damaged)))}. They are not "
        "finite, or too large for any training, although all gradients that were applied are finite: suspect the "
        "memory of that device, or a learning rate that is far too high. Start the run again from the last checkpoint"
    )


def ranks_text(of_ranks: list[tuple[int, list[str]]]) -> str:
    """Return the first tensors in (rank, names of its tensors), for a message."""
    texts = [
        f"rank {rank}, {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for rank, names in sorted(of_ranks)
        if names
    ]
    return "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more ranks" if len(texts) > 4 else "")

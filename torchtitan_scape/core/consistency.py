"""Whether replicas still hold the same numbers where they must, to the last bit.

Each replica updates by itself what all of them hold. A bit that flips in the memory of one, or a kernel that errs
there, parts it from the others for good, and nothing in the loss tells. So each rank hashes, now and then, what is to
be equal over the replicate axis, and compares eight bytes with its twins.

What one replica holds alone cannot be compared: residuals, rounding errors, and in the sharded form an owner's moments
and master. The moment that all hold on the mask is not hashed either, to spare reading the state: where it is wrong and
is used, parameters differ one step later.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.scape.reference import unpack_bits
from topology.collectives import ReplicaCollectives

logger = logging.getLogger(__name__)

# Of the hash. A prime: entries that lie whole rows of a matrix apart shall not meet in a column.
_COLUMNS = 1021
# Hashed at a time: what lies on the host, or where 64-bit words cannot be read, is copied so.
_CHUNK_BYTES = 1 << 26
# Odd, and signed.
_ODD, _FACTOR = 0x9E3779B97F4A7C15 - (1 << 64), 0xD6E8FEB86659FD93 - (1 << 64)


class ReplicasDifferError(RuntimeError):
    """Replicas have come to hold different numbers."""

    exit_code = 3  # of the process: starting again from the last checkpoint helps


@dataclass(frozen=True)
class ReplicatedTensors:
    """What all replicas hold alike of one parameter, or of all of them (`name` is None).

    parts: (what it is, the tensor), of any dtype and shape, on the host where it is offloaded; None stands for the
        parameter's own numbers. Every replica has as many, of the same sizes.
    on_mask: (FP32 (n,), packed bits or None for all ones): state that all hold alike where the bits are set.
    """

    name: str | None
    parts: list[tuple[str | None, Tensor]]
    on_mask: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)


# -------------------------------------------------------------------------------------------------- hashes


def fingerprints(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """int64 (tensors,), on `device`: hashes that any one flipped bit changes for sure, in one read of the tensors.

    Words of 64 bits are added up by column, in integers, so that no order matters; what becomes of the sums then can
    be undone, so that no change of a single one gets lost. Words that change places show, unless they are a multiple
    of `_COLUMNS` words apart.
    """
    sums: list[Tensor] = []
    places: list[tuple[int, int]] = []  # (tensor, chunk of it)
    for number, tensor in enumerate(tensors):
        data = tensor.detach().reshape(-1).view(torch.uint8)
        for place, chunk in enumerate(data.split(_CHUNK_BYTES)):
            chunk = chunk.to(device, non_blocking=True)
            if chunk.numel() % 8 or chunk.storage_offset() % 8:
                chunk = torch.nn.functional.pad(chunk.clone(), (0, -chunk.numel() % 8))
            sums.append(_column_sums(chunk.view(torch.int64)))
            places.append((number, place))
    numbers, chunks = torch.tensor(places, device=device).unbind(1)
    of_chunks = _scrambled(_numbered(torch.stack(sums))).sum(1)
    found = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    return found.index_add_(0, numbers, _scrambled(of_chunks + chunks * _ODD))


def combined(hashes: Tensor) -> Tensor:
    """int64 (1,): of int64 (n,); it changes for sure where one of them does."""
    return _scrambled(_numbered(hashes)).sum().view(1)


def _column_sums(words: Tensor) -> Tensor:
    """int64 (_COLUMNS,): of int64 (n,)."""
    rows = words.numel() // _COLUMNS
    sums = words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0)
    rest = words[rows * _COLUMNS :]
    sums[: rest.numel()] += rest
    return sums


def _numbered(values: Tensor) -> Tensor:
    """Equal values in other columns become other values."""
    return values + torch.arange(1, values.shape[-1] + 1, device=values.device) * _ODD


def _scrambled(values: Tensor) -> Tensor:
    """One to one, int64 to int64, so that sums of the result depend on all bits."""
    for _ in range(2):
        values = values ^ (values >> 32 & 0xFFFFFFFF)  # a shift that brings in zeros
        values = values * _FACTOR
    return values ^ (values >> 32 & 0xFFFFFFFF)


# ------------------------------------------------------------------------------------------------ the check


@dataclass(frozen=True)
class _Mismatch:
    """Twins that do not agree on one `ReplicatedTensors`.

    odd: which of the twins hold something else than most; all of them where there is no majority.
    source: one of the majority, None without one.
    parts: numbers of the parts that differ.
    """

    shared: ReplicatedTensors
    odd: tuple[int, ...]
    source: int | None
    parts: tuple[int, ...]

    @property
    def what(self) -> str:
        kind = self.shared.parts[self.parts[0]][0]
        name = repr(self.shared.name) if self.shared.name else ""
        return " of ".join(text for text in (kind, name) if text)


@torch.no_grad()
def check_replicas_equal(
    collectives: ReplicaCollectives, shared: Sequence[ReplicatedTensors], device: torch.device, step: int, repair: bool
) -> bool:
    """Whether nothing had to be repaired. A collective call; all ranks of all replicas come to the same result.

    Waits for the device. Bytes are not counted: eight for each twin, unless something differs.

    shared: the same on all `peers`. device: where hashes are computed and compared.
    repair: overwrite what differs by what most of the twins hold.

    Raises ReplicasDifferError that names ranks and parameters: without `repair`, without a majority, and where replicas
    differ again right after a repair.
    """
    hashes = fingerprints([tensor for one in shared for _, tensor in one.parts], device)
    every = collectives.gather_from_peers(combined(hashes))
    # Other twins, of other shards, must hear of it.
    if not collectives.sum_over_all((every != every[0]).any().double()).item():
        return True
    peers, place = collectives.peers
    findings = _findings(shared, collectives.gather_from_peers(hashes).tolist())
    own = (_texts(findings, peers), all(finding.source is not None for finding in findings))
    reports = collectives.gather_objects(own)
    texts = list(dict.fromkeys(text for told, _ in reports for text in told))
    told = f"step {step}: " + "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")
    if not repair or not all(good for _, good in reports):
        raise ReplicasDifferError(
            f"{told}: replicas must be equal to the last bit, so memory or a computation has failed there"
            + (" (on_inconsistency = 'repair' needs a majority)" if repair else "")
            + ". Every checkpoint was checked before it was written: the last one is whole, start again from it"
        )
    for finding in findings:
        _repair(finding, collectives, device, place)
    try:
        check_replicas_equal(collectives, shared, device, step, False)
    except ReplicasDifferError as error:
        raise ReplicasDifferError(f"after a repair at {error}") from None
    logger.warning(f"{told}: overwritten by what most replicas hold")
    return False


def _findings(shared: Sequence[ReplicatedTensors], every: list[list[int]]) -> list[_Mismatch]:
    """every: the hashes of all parts, a row a twin."""
    found, first = [], 0
    for one in shared:
        rows = [tuple(row[first : first + len(one.parts)]) for row in every]
        first += len(one.parts)
        if len(set(rows)) == 1:
            continue
        most, count = Counter(rows).most_common(1)[0]
        source = rows.index(most) if 2 * count > len(rows) else None
        odd = tuple(i for i, row in enumerate(rows) if source is None or row != most)
        parts = tuple(i for i, values in enumerate(zip(*rows, strict=True)) if len(set(values)) > 1)
        found.append(_Mismatch(one, odd, source, parts))
    return found


def _texts(findings: Sequence[_Mismatch], peers: list[int]) -> list[str]:
    """One for every group of ranks that are odd in the same parameters."""
    by_ranks: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for finding in findings:
        by_ranks.setdefault((finding.odd, finding.source is None), []).append(finding.what)
    texts = []
    for (odd, undecided), names in by_ranks.items():
        what = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        if undecided:
            texts.append(f"{_ranks([peers[i] for i in odd])} differ in {what}, and no majority tells which is right")
            continue
        others = _ranks([rank for i, rank in enumerate(peers) if i not in odd])
        ranks = _ranks([peers[i] for i in odd])
        verb = "differs" if len(names) == 1 else "differ"
        texts.append(ranks + ("'s " if len(odd) == 1 else ": ") + f"{what} {verb} from {others}")
    return texts


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {ranks[0]}, {ranks[1]} and {len(ranks) - 2} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _repair(finding: _Mismatch, collectives: ReplicaCollectives, device: torch.device, place: int) -> None:
    """Takes what differs from the source, and its state where that is shared; own residuals stay."""
    source, is_odd = finding.source, place in finding.odd
    assert source is not None
    for number in finding.parts:
        tensor = finding.shared.parts[number][1].detach()
        values = tensor.to(device).contiguous()
        collectives.broadcast(values, source)
        if is_odd and values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)
    for state, bits in finding.shared.on_mask:
        theirs = state.to(device, copy=True)
        collectives.broadcast(theirs, source)
        if is_odd and bits is not None:
            theirs = torch.where(unpack_bits(bits, state.numel()), theirs, state.to(device))
        if is_odd:
            state.copy_(theirs)

"""The parameters that Muon updates, by names, patterns, a function or the default rule, and their division into blocks.

A block is a contiguous range of rows or columns that Muon orthogonalizes by itself, such as query, key and value.
"""

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor

from torchtitan_scape.core.hidden_matrices import is_hidden_matrix, is_unknown_stack
from torchtitan_scape.core.parameters import Shard, matching

# A function of (name, parameter), names or patterns as of `fnmatch`, or None for the default rule.
MatrixChoice = Callable[[str, Tensor], bool] | Sequence[str] | None

# By name or pattern: the number of equal blocks of rows, or the sizes of blocks of rows or columns.
MatrixSplit = Mapping[str, int | Sequence[int]]
ROWS, COLUMNS = -2, -1  # dimensions of a matrix or a stack of matrices

logger = logging.getLogger(__name__)


def is_hidden(shard: Shard) -> bool:
    """Return whether Muon updates the parameter by default."""
    return is_hidden_matrix(shard.name, shard.whole_shape)


def choose_matrices(shards: Sequence[Shard], matrices: MatrixChoice) -> list[Shard]:
    """Return the parameters that Muon updates.

    Raises:
        ValueError: A pattern matches nothing, nothing is chosen, or a chosen parameter is no matrix.
    """
    if matrices is None:
        chosen = [shard for shard in shards if is_hidden(shard)]
    elif callable(matrices):
        chosen = [shard for shard in shards if matrices(shard.name, shard.parameter)]
        _check_matrices(chosen)
    else:
        several = isinstance(matrices, Iterable) and not isinstance(matrices, str | Tensor)
        chosen = _matching(shards, list(matrices) if several else [matrices])
    if not chosen:
        raise ValueError(_nothing_chosen(shards, matrices))
    return chosen


def check_names(param_groups: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError for parameters without names."""
    if any("param_names" not in group for group in param_groups):
        raise ValueError(
            "Muon chooses its matrices by the names of parameters, and these have none; pass model.named_parameters() "
            "instead of model.parameters(), in a param group too"
        )


def _matching(shards: Sequence[Shard], patterns: Sequence[Any]) -> list[Shard]:
    """Return the parameters that names or patterns match. A pattern with wildcards leaves out vectors."""
    chosen: dict[str, Shard] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(
                f"matrices has a value of type {type(pattern).__name__}; pass names or patterns, such as "
                "['h.*.weight'], or a function of (name, parameter)"
            )
        matches = matching(shards, pattern)
        if not matches:
            raise ValueError(
                f"matrices contains {pattern!r}, which matches no parameter; the first is {shards[0].name!r}, the last "
                f"{shards[-1].name!r}, and * is a wildcard; a tied weight has the first of its names"
            )
        kept = [s for s in matches if len(s.whole_shape) > 1]
        _check_matrices(kept or matches)
        chosen |= {s.name: s for s in kept}
    return [shard for shard in shards if shard.name in chosen]


def _check_matrices(shards: Sequence[Shard]) -> None:
    for shard in shards:
        if len(shard.whole_shape) not in (2, 3):
            raise ValueError(
                f"matrices chooses {shard.name!r} of shape {tuple(shard.whole_shape)}, and Muon updates matrices (two "
                "dimensions) and stacks of matrices (three); leave it out, so that AdamW updates it"
            )


def _nothing_chosen(shards: Sequence[Shard], matrices: MatrixChoice) -> str:
    advice = (
        "pass matrices=, names or patterns such as ['blocks.*.weight'] or a function of (name, parameter), or in the "
        "trainer set [optimizer] name = 'AdamW'"
    )
    if matrices is not None:
        return f"matrices chooses none of the {len(shards)} parameters from {shards[0].name!r}; {advice}"
    return (
        "Muon updates matrices of blocks, named like 'layers.0.attention.wq.weight', and none of "
        f"{shards[0].name!r} to {shards[-1].name!r} is one; {advice}"
    )


# --------------------------------------------------------------------------------- blocks of a matrix


@dataclass(frozen=True)
class MatrixBlocks:
    """The division of a matrix (a, b), or of every matrix of a stack, along one dimension.

    Attributes:
        shape: (a, b).
        sizes: Rows or columns of every block; a single block is the whole matrix.
        dim: `ROWS` or `COLUMNS`.
    """

    shape: tuple[int, int]
    sizes: tuple[int, ...]
    dim: int = ROWS

    @classmethod
    def whole(cls, shard: Shard) -> "MatrixBlocks":
        rows, columns = shard.whole_shape[-2:]
        return cls((rows, columns), (rows,))


def blocks_of(hidden: Sequence[Shard], split: MatrixSplit | None) -> dict[int, MatrixBlocks]:
    """Return the blocks of Muon's matrices, by id of the parameter, in the order of `hidden`.

    Raises:
        ValueError: A pattern matches none of them, two match the same, or the sizes do not fit.
    """
    by_id = {id(shard.parameter): MatrixBlocks.whole(shard) for shard in hidden}
    by: dict[int, str] = {}
    split = {} if split is None else split
    if not isinstance(split, Mapping) or not all(isinstance(pattern, str) for pattern in split):
        raise ValueError(
            f"split, of type {type(split).__name__}, must be a dictionary from names or patterns to blocks, such as "
            "{'*.c_attn.weight': 3}"
        )
    for pattern, blocks in split.items():
        matches = matching(hidden, pattern)
        if not matches:
            raise ValueError(
                f"split contains {pattern!r}, which matches none of Muon's matrices, such as {hidden[0].name!r}; * is "
                "a wildcard, and matrices= chooses further ones"
            )
        for shard in matches:
            i = id(shard.parameter)
            if i in by:
                raise ValueError(f"{by[i]!r} and {pattern!r} of split both match {shard.name!r}; keep one of them")
            by[i] = pattern
            by_id[i] = _divided(shard.name, by_id[i].shape, blocks)
    return by_id


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _divided(name: str, shape: tuple[int, int], blocks: int | Sequence[int]) -> MatrixBlocks:
    rows, columns = shape
    given = f"split of {name!r}, a matrix of ({rows}, {columns}), is {blocks!r}"
    if _is_count(blocks):
        if blocks > 1 and columns == blocks * rows:
            width = columns // blocks
            raise ValueError(
                f"{given}, which divides rows; the columns seem to be the fused ones, as in transformers' Conv1D: pass "
                f"the sizes {(width,) * blocks}"
            )
        if rows % blocks:
            raise ValueError(f"{given}; it must divide the rows, or be the sizes of all blocks")
        return MatrixBlocks(shape, (rows // blocks,) * blocks)
    sizes = tuple(blocks) if isinstance(blocks, Sequence) and not isinstance(blocks, str) else ()
    if not sizes or not all(map(_is_count, sizes)):
        raise ValueError(
            f"{given} of type {type(blocks).__name__}; it must be a number of equal blocks of rows, or the sizes of "
            "all blocks, positive integers. Blocks are contiguous; leave out matrices whose query, key and value are "
            "interleaved"
        )
    if sum(sizes) not in shape:
        raise ValueError(f"{given}, {sum(sizes)} together; the sizes must add up to its rows or its columns")
    return MatrixBlocks(shape, sizes, ROWS if sum(sizes) == rows else COLUMNS)


# ---------------------------------------------------------------------------------------- saved states


def checksum(values: Sequence[Any]) -> str:
    """Return the number of the values, and a checksum."""
    return f"{len(values)} (checksum {zlib.crc32(repr(values).encode()):08x})"


_OTHER_OPTIMIZER = "load it into the optimizer that saved it, or start Muon without it"


def other_choice(updates: Callable[[Shard], bool], saved: Iterable[tuple[Shard, bool]]) -> str:
    """Return how a saved state differs from this run's choice, and the fix; "" if it does not.

    Args:
        updates: Whether Muon updates a parameter in this run.
        saved: Parameters of the state, and whether they have a second moment, which Muon does not need.
    """
    pairs = list(saved)
    different = [(shard, has_second) for shard, has_second in pairs if has_second == updates(shard)]
    if not different:
        return ""
    before = [shard for shard, has_second in pairs if not has_second]
    if not before or any(len(shard.whole_shape) not in (2, 3) for shard in before):
        return (
            f"is not Muon's: {len(pairs) - len(before)} of {len(pairs)} parameters have a second moment, and Muon "
            f"saves those of all parameters but its matrices; {_OTHER_OPTIMIZER}"
        )
    shard, has_second = different[0]
    one, other = ("AdamW", "Muon") if has_second else ("Muon", "AdamW")
    return (
        f"is of another choice of matrices: {one} updated {shard.name!r}, and {other} does in this run; pass matrices= "
        f"with those that Muon updated in the saved run, {_listed(before)}"
    )


def check_state(state_dict: dict[str, Any], shards: Sequence[Shard], updates: Callable[[Shard], bool]) -> None:
    """Raise ValueError for a state with second moments of Muon's parameters, without those of AdamW's, or without all
    moments of a parameter.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    saved = [state_dict["state"].get(number, {}) for number in numbers]
    if len(saved) == len(shards):  # else torch raises
        if without := [shard.name for shard, one in zip(shards, saved, strict=True) if not one]:
            raise ValueError(f"the state is not Muon's: it has no moments of {without[0]!r}; {_OTHER_OPTIMIZER}")
        pairs = [(shard, "exp_avg_sq" in one) for shard, one in zip(shards, saved, strict=True)]
        if error := other_choice(updates, pairs):
            raise ValueError(f"the state {error}")


# ---------------------------------------------------------------------------------------------- the log


@contextmanager
def unreported() -> Iterator[None]:
    """Omit the log lines of optimizers that are built inside, copies of one that was reported."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def report_choice(shards: Sequence[Shard], hidden: Sequence[Shard], divided: int, matrices: MatrixChoice) -> None:
    """Log numbers and examples of the parameters that Muon updates, and of those of AdamW.

    Args:
        divided: Number of matrices that are divided into blocks.
    """
    chosen = {id(shard) for shard in hidden}
    rest = [shard for shard in shards if id(shard) not in chosen]
    logger.info(f"Muon: {_counted(hidden)}, {divided} divided into blocks; AdamW: {_counted(rest)}")
    unknown = [s for s in rest if is_unknown_stack(s.name, s.whole_shape)] if matrices is None else []
    if unknown:
        logger.warning(
            f"AdamW updates parameters of blocks with three dimensions ({_listed(unknown)}), because the names are not "
            "those of experts; if each is a stack of matrices, choose them by matrices="
        )


def _counted(shards: Sequence[Shard]) -> str:
    entries = sum(shard.entries for shard in shards)
    return f"{len(shards)} parameters of {entries:,} entries ({_listed(shards)})"


def _listed(shards: Sequence[Shard]) -> str:
    """Return the names of the largest three, and the number of the others."""
    names = [repr(shard.name) for shard in sorted(shards, key=lambda shard: -shard.entries)]
    others = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return ", ".join(names[:3]) + others

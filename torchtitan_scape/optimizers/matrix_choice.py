"""The choice of the parameters that Muon updates: by a user's names, patterns or function, or by the default rule."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from torchtitan_scape.core.hidden_matrices import is_hidden_matrix, is_unknown_stack
from torchtitan_scape.core.parameters import Shard

# A function of (name, parameter), names or patterns as of `fnmatch`, or None for the default rule.
MatrixChoice = Callable[[str, Tensor], bool] | Sequence[str] | None

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
        chosen = _matching(shards, [matrices] if isinstance(matrices, str) else list(matrices))
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


def _matching(shards: Sequence[Shard], patterns: Sequence[str]) -> list[Shard]:
    """Return the parameters that names or patterns match. A pattern with wildcards leaves out vectors."""
    chosen: dict[str, Shard] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"matrices contains {pattern!r}; it must contain names or patterns, such as 'h.*.weight'")
        found = [s for s in shards if s.name == pattern or fnmatchcase(s.name, pattern)]
        if not found:
            raise ValueError(
                f"matrices contains {pattern!r}, which matches no parameter; the first is {shards[0].name!r}, the last "
                f"{shards[-1].name!r}, and * is a wildcard"
            )
        kept = [s for s in found if len(s.whole_shape) > 1]
        _check_matrices(kept or found)
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
    """Log which parameters Muon updates, and which AdamW.

    Args:
        divided: Number of matrices that are divided into blocks.
    """
    rest = [shard for shard in shards if not any(shard is one for one in hidden)]
    logger.info(f"Muon: {_described(hidden, divided)}; AdamW: {_listed(rest)}")
    unknown = [s for s in rest if is_unknown_stack(s.name, s.whole_shape)] if matrices is None else []
    if unknown:
        logger.warning(
            f"AdamW updates {_count(len(unknown), 'parameter')} of blocks with three dimensions, such as "
            f"{unknown[0].name} of {tuple(unknown[0].whole_shape)}, because the names are not those of experts; if "
            "each is a stack of matrices, choose them by matrices="
        )


def _described(hidden: Sequence[Shard], divided: int) -> str:
    stacks = sum(len(shard.whole_shape) == 3 for shard in hidden)
    counts = [_count(len(hidden) - stacks, "matrix", "matrices")] if len(hidden) > stacks else []
    counts += [_count(stacks, "stack of matrices", "stacks of matrices")] if stacks else []
    shapes = _count(len({tuple(shard.whole_shape) for shard in hidden}), "shape")
    blocks = f", {divided} in blocks" if divided else ""
    return f"{' and '.join(counts)} ({shapes}, {_entries(hidden)}{blocks}), for example {hidden[0].name}"


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"


def _listed(rest: Sequence[Shard]) -> str:
    if not rest:
        return "no parameters"
    largest = sorted(rest, key=lambda shard: -shard.entries)
    names = ", ".join(shard.name for shard in largest[:3])
    others = f" and {_count(len(rest) - 3, 'other')}" if len(rest) > 3 else ""
    return f"{_count(len(rest), 'parameter')} ({_entries(rest)}): {names}{others}"


def _entries(shards: Sequence[Shard]) -> str:
    count = float(sum(shard.entries for shard in shards))
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit} entries"
    return f"{count:.0f} entries"

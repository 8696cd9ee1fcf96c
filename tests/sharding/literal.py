"""ZeRO++ (arXiv:2306.10209), entry by entry in NumPy, without product code; sums are in rank order."""

from collections.abc import Sequence

import numpy as np

Segments = Sequence[tuple[int, int, int]]
"""(start, entries, dimensions) of a row's parameters."""
LARGEST = {"int8": np.float32(127), "int4": np.float32(7)}
HADAMARD = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(32)] for i in range(32)]) / np.sqrt(32)


def coded(x: np.ndarray, code: str, block: int) -> np.ndarray:
    """Return the decoded values of FP32 (n,), encoded in zero-padded blocks of one parameter."""
    padded = np.zeros(-(-len(x) // block) * block, np.float32)
    padded[: len(x)] = x
    out = []
    for part in padded.reshape(-1, block):
        scale = np.abs(part).max() / LARGEST[code]
        levels = np.rint(part / scale) if np.abs(part).max() >= 2.0**-100 else np.zeros_like(part)
        out.append(np.clip(levels, -LARGEST[code], LARGEST[code]) * scale)
    return np.concatenate(out or [padded])[: len(x)]


def row_coded(row: np.ndarray, segments: Segments, code: str, block: int) -> np.ndarray:
    out = row.copy()
    for start, size, dims in segments:
        if dims > 1 and size:
            out[start : start + size] = coded(row[start : start + size], code, block)
    return out


def transformed(row: np.ndarray, segments: Segments, block: int) -> tuple[np.ndarray, Segments]:
    """Return the Hadamard-transformed row, FP64, with matrices zero-padded to whole blocks, and its segments."""
    parts, layout, start = [], [], 0
    for first, size, dims in segments:
        part = np.zeros(-(-size // block) * block if dims > 1 else size)
        part[:size] = row[first : first + size]
        parts.append((part.reshape(-1, 32) @ HADAMARD).reshape(-1) if dims > 1 else part)
        layout.append((start, len(part), dims))
        start += len(part)
    return np.concatenate(parts), layout


def reduced(
    flats: Sequence[np.ndarray],
    index: int,
    per_node: int,
    segments: Segments,
    codes: Sequence[str],
    block: int,
    turn: bool,
) -> np.ndarray:
    """Return row `index` of the sum of flats (S, m), one per rank, with one hop, or one within the node and one between
    nodes.
    """
    layout: Segments = segments
    rows = []
    for flat in flats:
        row = flat[index]
        if turn:
            row, layout = transformed(row, segments, block)
        rows.append(row.astype(np.float32))

    def hop(rows: Sequence[np.ndarray], code: str) -> np.ndarray:
        total = row_coded(rows[0], layout, code, block)
        for other in rows[1:]:
            total = total + row_coded(other, layout, code, block)
        return total

    if len(codes) == 1:
        total = hop(rows, codes[0])
    else:
        nodes = [hop(rows[first : first + per_node], codes[0]) for first in range(0, len(rows), per_node)]
        total = hop(nodes, codes[1])
    if not turn:
        return total
    out = np.zeros_like(flats[0][index])
    for (first, size, dims), (start, length, _) in zip(segments, layout, strict=True):
        part = total[start : start + length]
        back = (part.astype(np.float64).reshape(-1, 32) @ HADAMARD).reshape(-1) if dims > 1 else part
        out[first : first + size] = back[:size]
    return out

"""The file observations.npz in the dump folder: series and histograms, but no tensor entries."""

import io
import logging
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_scape.core.files import write_whole
from torchtitan_scape.observe.figures import Distribution

logger = logging.getLogger(__name__)

FILE = "observations.npz"


@dataclass
class Row:
    """Figures of one tensor at one step of a window, NaN where undefined, and all NaN for a skipped step.

    Attributes:
        density: Density of the overlap and of a shadow residual.
        overlap: Overlap of the largest |m| of this step with those of the previous step.
        gradient, sent, residual: Norms before clipping of the synchronized gradient, the sent entries and the residual.
        shadow: `sent` and `residual` are those of a shadow residual. Otherwise `sent` is the norm of the synchronized
            gradient, and `residual` is the root mean square over the replicas of the first process.
    """

    step: int
    tensor: str
    density: float
    overlap: float = math.nan
    gradient: float = math.nan
    sent: float = math.nan
    residual: float = math.nan
    shadow: bool = False


@dataclass
class Frequency:
    """In how many steps of a window, without skipped ones, entries were among the largest of the synchronized gradient.

    `entries`, int64 (steps + 1,), are the numbers of entries that were selected in 0, 1, ... steps.
    """

    first: int
    steps: int
    tensor: str
    density: float
    entries: Any


class Record:
    """Records of the writing rank: rows, frequencies, properties of the run as text, and histograms, which are (step,
    tensor, distribution of the synchronized gradient).
    """

    def __init__(self, folder: Path, facts: Mapping[str, str]) -> None:
        self.path, self.facts = folder / FILE, dict(facts)
        self.rows: list[Row] = []
        self.histograms: list[tuple[int, str, dict[str, Any]]] = []
        self.frequencies: list[Frequency] = []
        self._changed = False

    def begin(self, after: int) -> None:
        """Continue an existing file, without its records of steps beyond `after`, which will be repeated."""
        if after == 0 or not self.path.exists():
            return
        try:
            self.rows, self.histograms = read(self.path)
            self.frequencies = read_frequencies(self.path)
        except (OSError, ValueError, KeyError) as error:
            logger.warning(f"{self.path} cannot be read ({' '.join(str(error).split())}), and is overwritten")
        self.rows = [row for row in self.rows if row.step <= after]
        self.histograms = [one for one in self.histograms if one[0] <= after]
        self.frequencies = [one for one in self.frequencies if one.first + one.steps - 1 <= after]

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._changed = True

    def add_histogram(self, step: int, tensor: str, distribution: Distribution) -> None:
        figures = {k: v if isinstance(v, int | float) else v.cpu().numpy() for k, v in vars(distribution).items()}
        self.histograms.append((step, tensor, figures))
        self._changed = True

    def add_frequency(self, frequency: Frequency) -> None:
        self.frequencies.append(frequency)
        self._changed = True

    def write(self) -> None:
        """Write the file atomically if there are new records. A failure is only logged."""
        if not self._changed:
            return
        self._changed = False
        arrays: dict[str, Any] = {f"fact.{key}": np.array(value) for key, value in self.facts.items()}
        histograms = [{"step": step, "tensor": tensor, **figures} for step, tensor, figures in self.histograms]
        tables = {"series": map(vars, self.rows), "histogram": histograms, "frequency": map(vars, self.frequencies)}
        for table, records in tables.items():
            for key, values in _columns(records).items():
                arrays[f"{table}.{key}"] = np.array(values)
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, content.getvalue())
        except OSError as error:
            logger.warning(f"{self.path} cannot be written ({error.strerror})")


def _columns(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of records by key; arrays are padded to the length of the longest one."""
    columns: dict[str, list[Any]] = {}
    for record in records:
        for key, value in record.items():
            columns.setdefault(key, []).append(value)
    for key, values in columns.items():
        if np.ndim(values[0]):
            longest = max(map(len, values))
            columns[key] = [np.pad(np.asarray(value), (0, longest - len(value))) for value in values]
    return columns


def _records(arrays: Mapping[str, Any], table: str, keys: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    names = [f"{table}.{key}" for key in keys]
    columns = [arrays[name] for name in names] if names[0] in arrays else []
    return (tuple(map(_plain, values)) for values in zip(*columns, strict=True))


def read(path: Path) -> tuple[list[Row], list[tuple[int, str, dict[str, Any]]]]:
    """Return the rows and histograms of a file. Raises OSError, ValueError or KeyError for another file."""
    arrays, keys = _load(path), list(Distribution.__dataclass_fields__)
    rows = [Row(*values) for values in _records(arrays, "series", Row.__dataclass_fields__)]
    return rows, [
        (step, tensor, dict(zip(keys, values, strict=True)))
        for step, tensor, *values in _records(arrays, "histogram", ("step", "tensor", *keys))
    ]


def read_frequencies(path: Path) -> list[Frequency]:
    """Return the index frequencies of a file; see `read` for what is raised."""
    records = [Frequency(*values) for values in _records(_load(path), "frequency", Frequency.__dataclass_fields__)]
    for one in records:
        one.entries = one.entries[: one.steps + 1]
    return records


def _load(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:  # None of them is a subclass of the documented errors.
        raise ValueError(str(error)) from None


def _plain(value: Any) -> Any:
    return value if getattr(value, "shape", ()) else value.item()

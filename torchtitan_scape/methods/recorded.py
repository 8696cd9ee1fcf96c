"""Memory traffic, temporary memory and states of the methods, as recorded from their steps. Imports no torch.

`python -m scripts.benchmarks.record_steps` takes a step of every method on meta tensors and writes recorded.json. A
method without a recording is planned without traffic and states of its own.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

STORED = Path(__file__).with_name("recorded.json")
FP32_BYTES = 4.0


class StepRecording(NamedTuple):
    """What a step moves, needs and keeps.

    Attributes:
        moved: Bytes per entry of the model that the passes of a step with an exchange read and write, without the
            optimizer's.
        temporary: Largest bytes of temporary tensors, without complete messages of all replicas: per entry that
            `topology.traffic.entries_in_flight` counts, or per entry of the model for methods that do not stream.
        held: Bytes of the states per entry of the model, by kind.
    """

    moved: float = 0.0
    temporary: float = FP32_BYTES
    held: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class RecordedSetting:
    """The recordings of one setting of a method.

    Attributes:
        options: Values of the options in which the settings of this method differ.
        rows: By replicas, whether there are several link levels, and whether the exchange overlaps.
    """

    options: dict[str, Any]
    rows: dict[tuple[int, bool, bool], StepRecording]

    def distance(self, options: dict[str, Any]) -> float:
        """Return the difference from other values: 1 for another choice, at most 0.5 for another number."""
        return sum(_difference(value, options[key]) for key, value in self.options.items())


def recorded(options: Any, replicas: int, several_levels: bool = False, overlap: bool = False) -> StepRecording:
    """Return the recording of the most similar setting, interpolated over the logarithm of the replicas."""
    settings = _settings().get(options.method_name(), ())
    if not settings:
        return StepRecording()
    values = asdict(options)
    rows = min(settings, key=lambda setting: setting.distance(values)).rows
    kind = next(kind for kind in ((several_levels, overlap), (False, overlap), (False, False)) if _has(rows, kind))
    points = sorted((count, row) for (count, *of_row), row in rows.items() if tuple(of_row) == kind)
    inside = min(max(replicas, points[0][0]), points[-1][0])
    for (least, first), (most, last) in pairwise(points):
        if least <= inside <= most:
            weight = math.log(most / inside) / math.log(most / least)
            moved, temporary = (weight * a + (1 - weight) * b for a, b in zip(first[:2], last[:2], strict=True))
            return StepRecording(moved, temporary, (first if inside == least else last).held)
    return points[0][1]


def _has(rows: dict[tuple[int, bool, bool], StepRecording], kind: tuple[bool, bool]) -> bool:
    return any(tuple(of_row) == kind for _, *of_row in rows)


def _difference(one: Any, other: Any) -> float:
    if one == other:
        return 0.0
    if isinstance(one, str | bool | list) or one <= 0 or other <= 0:
        return 1.0
    return min(0.5, abs(math.log(one / other)) / 10)


@functools.cache
def _settings() -> dict[str, list[RecordedSetting]]:
    """Return the stored settings by method."""
    by_method: dict[str, list[RecordedSetting]] = {}
    for setting in json.loads(STORED.read_text())["settings"] if STORED.is_file() else ():
        rows = {(n, bool(levels), bool(early)): StepRecording(*row) for n, levels, early, *row in setting["rows"]}
        by_method.setdefault(setting["method"], []).append(RecordedSetting(setting["options"], rows))
    return by_method

"""Base class of the methods' TOML sections, with what the planner must know about a method. Imports no torch.

A file that defines a section must not use `from __future__ import annotations`, see `core.options`.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

from torchtitan_scape.core.options import Options
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.traffic import CollectiveCall, Levels, LevelSize, all_reduce_stream, entries_in_flight

STORED = Path(__file__).with_name("recorded.json")


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
    temporary: float = 4.0
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


@dataclass
class MethodOptions(Options):
    """TOML section of one method; the only place where its options are declared.

    The functions below `collective_calls` describe a step after warm-up, in bytes and without the optimizer
    (`optimizers/cost.py`). `model` has the names and shapes of this rank's shards. Memory traffic, temporary memory and
    states are recorded from the step, see `recorded`; a method overrides what depends on more than the number
    of entries, and `collective_calls` unless it exchanges all gradients in FP32.

    Class attributes:
        main_options: Options that determine the bytes sent, the most important one first; the planner prints them.
        holds_optimizer_state: The method performs the update itself and stores the moments; the wrapped optimizer
            supplies the rates alone. `memory_traffic` and `held_memory` contain parameters, gradients and the
            optimizer's state.
        per_replica_weights: Every replica runs the optimizer on its own gradients, and the replicas' weights differ
            between exchanges. One of the states then has `on_migration` = "model".
        divides_update: Each replica runs the optimizer on its share of the parameters, whose state it alone has, and
            sends changes of the weights. The wrapped optimizer supplies the rates alone.
    """

    main_options: ClassVar[tuple[str, ...]] = ()
    holds_optimizer_state: ClassVar[bool] = False
    per_replica_weights: ClassVar[bool] = False
    divides_update: ClassVar[bool] = False

    @classmethod
    def method_name(cls) -> str:
        """Return the name of the method in `[sync] method`."""
        return cls.section.removeprefix("sync.")

    def resolve(self, shapes: Sequence[Sequence[int]], replicas: int) -> Self:
        """Return the options with values chosen for this model.

        Args:
            shapes: Shapes of this rank's shards.

        Raises:
            ValueError: No value satisfies the options.
        """
        return self

    def for_optimizer(self, name: str) -> Self:
        """Return the options without those that have no effect with an optimizer, `[optimizer] name`."""
        return self

    def resolve_for_links(self, shapes: Sequence[Sequence[int]], layout: Layout, rank: int, levels: int) -> Self:
        """Return the options with defaults chosen for the links between replicas.

        Args:
            shapes: Shapes of this rank's shards.
            layout: Layout of the run, simulated replicas included.
            rank: This rank.
            levels: Number of link levels for which communicators were built.
        """
        return self

    def needs_comm_streams(self) -> bool:
        """Return whether an exchange on a single level has several stages and therefore needs comm streams."""
        return False

    def delays_exchanges(self) -> bool:
        """Return whether an exchange is in flight during the following steps."""
        return False

    def simulation_error(self) -> str:
        """Return why simulated replicas do not support these options; "" if they do."""
        return ""

    def steps_per_round(self) -> int:
        """Return the number of steps in which every parameter is exchanged and its result applied."""
        return 1

    def label(self) -> str:
        """Return the method, the first of its main options if that is a number, and its code: for tables and logs."""
        first = getattr(self, self.main_options[0]) if self.main_options else ""
        code = getattr(self, "code", "float32")
        parts = [f"{first:g}" if not isinstance(first, str) else "", code if code != "float32" else ""]
        return " ".join([self.method_name(), *filter(None, parts)])

    def offloaded(self) -> tuple[str, ...]:
        """Return the states that are kept in host memory."""
        return ()

    def supports_overlap(self) -> bool:
        """Return whether the exchange can run during the last backward pass of a step."""
        return False

    # ------------------------------------------------------------------------------------- cost of a step

    def collective_calls(self, model: LocalModel, levels: Levels, chunk_entries: int = 0) -> list[CollectiveCall]:
        """Return the collectives of a step, in their order.

        Args:
            levels: Levels that the replicas span, innermost first; none for a single replica.
            chunk_entries: Maximum elements of a chunk; 0 for those of `topology.partition.chunk_limit`.
        """
        return [all_reduce_stream(model.sizes, levels, chunk_entries)]

    @property
    def scalar_reductions(self) -> int:
        """All-reduces of a scalar that a step waits for: the finite flag and, if owners update, the norm."""
        return 2 if self.divides_update else 1

    def exchange_share(self) -> float:
        """Return the share of a whole exchange that a step takes in the mean."""
        return 1.0

    def held_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the memory of the method's states on the device, by kind. The default is the recorded one."""
        return {kind: nbytes * model.entries for kind, nbytes in recorded(self, replicas).held.items() if nbytes}

    def temporary_memory(
        self, model: LocalModel, replicas: int, several_levels: bool = False, overlap: bool = False
    ) -> dict[str, float]:
        """Return the largest memory of messages and buffers during a step, by kind."""
        if replicas == 1:
            several_levels = overlap = False
        calls = self.collective_calls(model, [LevelSize("network", replicas)])
        nbytes = recorded(self, replicas, several_levels, overlap).temporary
        streams = all(call.chunks for call in calls) and not overlap
        in_flight = nbytes * (entries_in_flight(calls) if streams else model.entries)
        messages = float(replicas * sum(c.count for c in calls if c.kind == "all_gather" and not c.chunks))
        kinds = {"messages": messages, "chunks in flight": in_flight if replicas > 1 else 0.0}
        return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}

    def basis_memory(self, model: LocalModel, replicas: int) -> float:
        """Return the memory of the bases in which gradients are encoded, of all owners together."""
        return 0.0

    def host_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the memory on the host, by kind."""
        return {}

    def host_link_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return the bytes that (the packing pass, the other passes) copy between device and host, in both directions.

        Both directions are added.
        """
        return 0.0, 0.0

    def memory_traffic(
        self, model: LocalModel, replicas: int, several_levels: bool = False, overlap: bool = False
    ) -> tuple[float, float]:
        """Return the traffic of (the packing pass, the other passes) of a step: each input and output counts once.

        Args:
            several_levels: Replicas span several link levels.
            overlap: The exchange runs during the backward pass.
        """
        moved = recorded(self, replicas, several_levels, overlap).moved
        return 0.0, moved * self.exchange_share() * model.entries

    def matrix_flops(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return the floating-point operations of the exchange's matrix products in a step, on this rank: (TF32, FP32).

        On devices without TF32 all are in FP32.
        """
        return 0.0, 0.0

    def update_groups(self, model: LocalModel) -> Sequence[LocalModel]:
        """Return the parameters of a model that the optimizer updates in each step of a round."""
        return [model]

    def updated_model(self, model: LocalModel, replicas: int) -> LocalModel:
        """Return what the optimizer of the busiest replica has: the model, unless replicas divide the update."""
        return model


def share_of_dense(options: MethodOptions, model: LocalModel, replicas: int) -> float:
    """Return the bytes that a replica sends per step, masks and scales included, relative to dense FP32 gradients.

    Every replica is assumed to be on its own node; a single replica is counted as one of two.
    """
    levels = [LevelSize("network", max(2, replicas))]
    sent = sum(stage.sent for call in options.collective_calls(model, levels) for stage in call.stages(levels))
    dense = 2.0 * (levels[0].size - 1) / levels[0].size * 4.0 * model.entries
    return sent / dense if dense else 0.0


@dataclass
class DenseOptions(MethodOptions):
    """[sync.dense]: gradients in FP32, uncompressed (the baseline). It has no options."""

    section: ClassVar[str] = "sync.dense"

    def supports_overlap(self) -> bool:
        return True

"""Comparison of the saving and the resuming run."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from torchtitan_scape.checkpoint.metadata import FORMAT, RunMetadata, parse_record
from torchtitan_scape.sharding.options import LevelsOptions, ShardingOptions


def compare(here: dict[str, Any], saved: dict[str, Any]) -> tuple[bool, dict[str, str]]:
    """Compare records with only these entries."""
    common = {"model": "llama3 study", "method": "scape", "optimizer": "AdamS"}
    there = {"format": FORMAT, "residual": "exact", "replicas": 2, "shard": 1, "states": {}, "counters": {}}
    metadata = object.__new__(RunMetadata)
    metadata.values, metadata._layout, metadata._kinds = common | here, set(here) - {"density"}, {"replica_weights"}
    record = parse_record(json.dumps(there | common | saved), "folder")
    return metadata.compare(record, "folder")


def test_removed_options_are_a_difference_unless_they_had_the_present_value() -> None:
    present = {"dense_names": [], "max_staleness": 1000, "keep_moment": None, "update_code": "float32"}
    assert compare({}, present) == (True, {})
    sharded = {"update": "sharded"}
    both = {"weights_dtype": "bfloat16", **sharded}
    assert compare(both, {"values": "bfloat16", **both}) == (True, {})
    assert compare(both, {"values": "float32", **both}) == (True, {})
    assert compare(both, {"values": "int4", **both}) == (False, {"values": "'int4' -> removed"})
    for key, value in {"dense_names": ["w"], "keep_moment": 1.0, "update_code": "int4"}.items():
        assert compare(sharded, {key: value, **sharded}) == (False, {key: f"{value!r} -> removed"})
    replicated = {"weights_dtype": "bfloat16", "update": "replicated"}  # sends no values
    assert compare(replicated, {"values": "float32", **replicated}) == (True, {})


def test_removed_options_of_the_shard_axis_are_not_a_difference() -> None:
    here = asdict(ShardingOptions(weights_code="int8", levels=LevelsOptions(sum_code="int8")))
    saved = here | {"weights_block": 256, "gradients_block": 128, "hadamard": True, "hops": "auto"}
    saved["tagc"] = here["tagc"] | {
        "code": "packed",
        "index_code": "auto",
        "ratio": 10.0,
        "fill": True,
        "micro": "last",
    }
    assert compare({"sharding": here}, {"sharding": saved}) == (True, {})
    different = compare({"sharding": here}, {"sharding": saved | {"weights_code": "dense"}})[1]
    assert different.keys() == {"sharding"} and "'weights_code': 'dense'" in different["sharding"]


def test_displacements_without_a_state_here_are_migrated() -> None:
    states = {kind: {"on_migration": "displacement"} for kind in ("replica_weights", "owner_error")}
    assert compare({}, {"states": states}) == (False, {})
    del states["owner_error"]
    assert compare({}, {"states": states}) == (True, {})


def test_options_of_another_method_are_not_compared() -> None:
    assert compare({"interval": 2}, {"interval": 1})[1] == {"interval": "1 -> 2"}
    assert "interval" not in compare({"interval": 3}, {"method": "sparta"})[1]


@pytest.mark.parametrize(("code", "same_layout"), [("float32", True), ("int4", False), (None, True)])
def test_another_density_migrates_quantization_errors(code: str | None, same_layout: bool) -> None:
    """A method without a code of its payload has no quantization errors."""
    known = {} if code is None else {"code": code}
    assert compare({"density": 0.02, **known}, {"density": 0.01, **known})[0] == same_layout

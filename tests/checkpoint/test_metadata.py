"""Comparison of the saving and the resuming run."""

from dataclasses import asdict
from typing import Any

import pytest

from torchtitan_scape.checkpoint.metadata import ALIASES, FORMAT, RunMetadata, stored_kind, to_present_format
from torchtitan_scape.sharding.levels_options import LevelsOptions
from torchtitan_scape.sharding.options import ShardingOptions


def compare(here: dict[str, Any], saved: dict[str, Any]) -> tuple[bool, dict[str, str]]:
    """Compare records with only these entries."""
    common = {"model": "llama3 study", "method": "scape", "optimizer": "AdamS"}
    metadata = object.__new__(RunMetadata)
    metadata.values, metadata._layout, metadata._kinds = common | here, set(here) - {"density"}, {"replica_weights"}
    return metadata.compare(to_present_format(common | saved, "folder"), "folder")


def test_renamed_options_are_not_a_difference() -> None:
    for version, code in ((1, "wire_dtype"), (2, "wire")):
        assert compare({"code": "int4"}, {"format": version, code: "int4"}) == (True, {})
        same, different = compare({"code": "int4"}, {"format": version, code: "float32"})
        assert not same and different == {"code": "'float32' -> 'int4'"}
    topk = {"method": "topk", "code": "2bit"}
    assert compare(topk, {"format": 2, "method": "topk", "values": "2bit"}) == (True, {})


def test_removed_options_are_a_difference_unless_they_had_the_present_value() -> None:
    present = {"dense_names": [], "max_staleness": 1000, "keep_moment": None, "update_code": "float32"}
    assert compare({}, {"format": FORMAT, **present}) == (True, {})
    sharded = {"update": "sharded"}
    both = {"weights_dtype": "bfloat16", **sharded}
    assert compare(both, {"format": 2, "values": "bfloat16", **both}) == (True, {})
    assert compare(both, {"format": 2, "values": "float32", **both}) == (True, {})
    assert compare(both, {"format": 2, "values": "int4", **both}) == (False, {"values": "'int4' -> removed"})
    for key, value in {"dense_names": ["w"], "keep_moment": 1.0, "update_code": "int4"}.items():
        assert compare(sharded, {"format": FORMAT, key: value, **sharded}) == (False, {key: f"{value!r} -> removed"})
    replicated = {"weights_dtype": "bfloat16", "update": "replicated"}  # sends no values
    assert compare(replicated, {"format": 2, "values": "float32", **replicated}) == (True, {})


def test_renamed_options_of_the_shard_axis_are_not_a_difference() -> None:
    here = asdict(ShardingOptions(weights_code="int8", levels=LevelsOptions(sum_code="int8")))
    saved = {key.removesuffix("_code"): value for key, value in here.items()}
    saved |= {"weights_block": 256, "gradients_block": 128, "hadamard": True, "hops": "auto"}  # removed options
    saved["levels"] = {key.removesuffix("_code"): value for key, value in here["levels"].items()}
    saved["tagc"] = here["tagc"] | {"codec": "packed", "index": "auto"}
    del saved["tagc"]["code"], saved["tagc"]["index_code"]
    assert compare({"sharding": here}, {"format": 2, "sharding": saved}) == (True, {})
    different = compare({"sharding": here}, {"format": 2, "sharding": saved | {"weights": "dense"}})[1]
    assert different.keys() == {"sharding"} and "'weights_code': 'dense'" in different["sharding"]


def test_displacements_without_a_state_here_are_migrated() -> None:
    states = {kind: {"on_migration": "displacement"} for kind in ("replica_weights", "owner_error")}
    assert compare({}, {"format": FORMAT, "states": states}) == (False, {})
    del states["owner_error"]
    assert compare({}, {"format": FORMAT, "states": states}) == (True, {})


def test_a_record_without_an_interval_is_of_an_exchange_in_every_step() -> None:
    """Records of an older version. The interval of another method is not compared."""
    assert compare({"interval": 1}, {}) == (True, {})
    same, different = compare({"interval": 2}, {})
    assert not same and different == {"interval": "1 -> 2"}
    assert "interval" not in compare({"interval": 3}, {"method": "sparta"})[1]


@pytest.mark.parametrize(("code", "same_layout"), [("float32", True), ("int4", False), (None, True)])
def test_another_density_migrates_quantization_errors(code: str | None, same_layout: bool) -> None:
    """A method without a code of its payload has no quantization errors."""
    known = {} if code is None else {"code": code}
    assert compare({"density": 0.02, **known}, {"density": 0.01, **known})[0] == same_layout


def test_a_record_of_format_1_is_read_under_the_present_names() -> None:
    described = {"own": True, "carries": "displacement", "by_parameter": True}
    unsent = {"own": False, "carries": "gradient", "by_parameter": False, "lies": {"layers.0": [2, "wq"]}}
    earlier = {"method": "sparta", "states": {"owed": described, "own_parameters": described, "shard_residual": unsent}}
    present = to_present_format(earlier, "folder")
    assert present["states"].keys() == {"owner_error", "replica_weights", "shard_residual"}
    assert present["states"]["owner_error"] == {
        "per_replica": True,
        "on_migration": "displacement",
        "by_parameter": True,
    }
    assert present["states"]["shard_residual"]["row_layout"] == {"layers.0": [2, "wq"]}
    # The tensors have the earlier names.
    assert [stored_kind(kind, present) for kind in present["states"]] == ["owed", "own_parameters", "shard_residual"]
    assert set(ALIASES["kinds"].values()) < present["states"].keys()


def test_a_record_of_this_format_stays() -> None:
    saved = {"format": FORMAT, "method": "dense", "states": {"owner_error": {"per_replica": True}}}
    assert to_present_format(saved, "folder") == saved and stored_kind("owner_error", saved) == "owner_error"


@pytest.mark.parametrize("version", [FORMAT + 1, 0, "2"])
def test_another_format_is_refused(version: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"folder has format {version!r}, and this version reads formats 1 to {FORMAT}"
    ):
        to_present_format({"format": version}, "folder")

"""The planner's variants of the shard axis, and their bytes between nodes."""

import json

import pytest

from torchtitan_scape.planner.candidates import make_request
from torchtitan_scape.planner.plan import main
from torchtitan_scape.planner.shard_axis import LEVELS, shard_axis_variants

FRONTIER = ("--machine", "frontier", "--nodes", "48", "--model", "llama_1_8b", "--shard-axis", "8")


def test_three_levels_against_overlapped_hsdp_on_48_nodes(capsys: pytest.CaptureFixture) -> None:
    """Nominal links hide dense traffic; on slow ones three levels with SCAPE gain."""
    gains = {}
    for bandwidth in ("12.5", "0.1"):
        assert main([*FRONTIER, "--network-bandwidth", bandwidth]) == 0
        said = capsys.readouterr().out
        assert "48 replica(s) of 8 ranks" in said
        (line,) = (text for text in said.splitlines() if "over 4, 8, 8 ranks" in text)
        assert line.startswith("three levels") and "scape 0.05 int4" in line
        gains[bandwidth] = float(line.split()[-1])
    assert gains["12.5"] < 1.1 and gains["0.1"] > 3.0


def test_json_contains_every_variant(capsys: pytest.CaptureFixture) -> None:
    assert main([*FRONTIER, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["form"] for one in found] == ["FSDP"] * 2 + ["ZeRO++"] * 2 + [LEVELS] * 6
    for one in found:
        assert one["step"] == pytest.approx(sum(one[k] for k in ("compute", "exchange", "shard", "optimizer", "fixed")))
    n = make_request("frontier", 48, "llama_1_8b").workload.parameters
    # Between nodes: an FP32 all-reduce; with levels an FP32 reduce-scatter and an INT8 all-gather; SCAPE 1 %.
    network = [one["network_bytes"] * 48 / 47 / (n / 8) for one in found]
    assert network[0] == network[2] == pytest.approx(8.0, rel=1e-3)
    assert network[4] == pytest.approx(4 + 1 + 4 / 256, rel=1e-3) and network[5] == network[1] < 0.12
    assert [one["memory"]["parameters"] for one in found[4::2]] == [2 * n / w for w in (1, 2, 4)]


def test_zeropp_where_the_shard_axis_crosses_nodes() -> None:
    """Without levels. All-gathers cross nodes once per step, and gradients are sent in four bits."""
    case = make_request("frontier", 4, "llama_1_8b", batch=128)
    found = shard_axis_variants(case, 32)
    assert [form.title for form in found] == ["FSDP", "FSDP", "ZeRO++", "ZeRO++"]
    dense, coded = found[0], found[2]
    assert coded.detail == "int8 + secondary, int8+int4" and coded.network < 0.2 * dense.network
    assert coded.prediction.memory["secondary weights"] > 0
    one_a_node = shard_axis_variants(make_request("vista", 4, "llama_1_8b"), 4)
    assert one_a_node[2].detail == "int8 + secondary, int4" and len(one_a_node) == 4


@pytest.mark.parametrize(
    ("shard", "message"), [("1", "a shard axis of 1 rank"), ("7", "384 ranks cannot be divided into shard 7")]
)
def test_invalid_degrees_raise_a_one_line_error(shard: str, message: str, capsys: pytest.CaptureFixture) -> None:
    assert main([*FRONTIER[:-1], shard]) == 2
    said = capsys.readouterr()
    assert said.out == "" and message in said.err

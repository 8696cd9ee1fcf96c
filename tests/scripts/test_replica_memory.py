"""The benchmark of the memory of real replicas."""

import torch

from scripts.benchmarks.replica_memory import resident, table


def test_the_high_water_mark_is_that_of_the_process() -> None:
    before = resident("VmHWM")
    held = torch.ones(1 << 25, dtype=torch.float32)  # 128 MiB
    assert resident("VmHWM") >= resident("VmRSS") > held.nbytes and resident("VmHWM") >= before


def test_the_table_has_a_row_for_every_method_of_both_trees() -> None:
    one = {"peak": 3.0, "held": 2.0, "predicted": {"state": 1.0, "chunks in flight": 0.5}}
    text = table({"replicas": 2, "entries": 1000, "trees": {"this": {"dense": one}, "base": {"dense": one}}})
    row = "dense | 3.00 | 2.00 | 1.50 | 1.00 | state 1.00, chunks in flight 0.50 |"
    assert f"| this | {row}" in text and f"| base | {row}" in text and "2 replicas, 1,000 parameters" in text

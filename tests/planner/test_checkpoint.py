"""Predicted size of a checkpoint, against the tensors of a checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.checkpoint.sizes import bytes_on_disk
from tests.pool import Pool
from tests.training import EMBEDDED, LAYOUTS, METHODS, RECIPE
from torchtitan_scape.core.text import size_text
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.planner.run import CheckpointCost, PlannedRun, Saving, checkpoint_bytes
from torchtitan_scape.topology.machines import Links, get_machine


def stored_and_predicted(folder: str, method: str, layout: str) -> list[tuple[str, float, float]]:
    """Return (residual, bytes of the parameters and all states, predicted bytes) before the first step."""
    from torchtitan_scape.checkpoint.own_loop import OPTIMIZER, checkpoint_states
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.models.registry import workload_of
    from torchtitan_scape.planner.configured import method_of
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    arguments = [*RECIPE, *EMBEDDED, *METHODS[method], *LAYOUTS[layout], f"--job.dump_folder={folder}"]
    config = parse([*arguments, "--checkpoint.no-enable", "--validation.no-enable"])
    trainer = ScapeTrainer(config)
    model, found = workload_of(config).whole(), []
    for residual in ("exact", "mean"):
        states = checkpoint_states(trainer.model_parts[0], trainer.replica_optimizer, residual)
        path = f"{folder}/{residual}"
        dcp.save({OPTIMIZER: states[OPTIMIZER]}, checkpoint_id=path)
        kinds = {"parameters": 4 * model.entries} | bytes_on_disk(path)
        predicted = checkpoint_bytes(method_of(config), model, trainer.layout.replicate, residual)
        found.append((residual, float(sum(kinds.values())), sum(predicted.values())))
    trainer.close()
    return found


@pytest.mark.parametrize("method", ["adamw", "muon", "scape", "scape-gather", "quantized", "quantized-update"])
def test_the_predicted_size_is_that_of_the_files(method: str, pool2: Pool, tmp_path: Path) -> None:
    for stored in pool2(stored_and_predicted, str(tmp_path), method, "1x2"):
        for residual, nbytes, predicted in stored:
            assert predicted == pytest.approx(nbytes, rel=0.03), residual


@pytest.mark.parametrize("method", ["diloco", "sparta", "onebit", "sparseloco", "scape-gather-bf16"])
def test_other_methods(method: str, pool2: Pool, tmp_path: Path) -> None:
    test_the_predicted_size_is_that_of_the_files(method, pool2, tmp_path)


def test_a_checkpoint_has_the_parts_of_all_owners() -> None:
    """The planner had the bases of one owner, and as many moments of every replica as of the one with most."""
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.models.registry import workload_of

    run = PlannedRun(QuantizedUpdateOptions(), "Muon")
    embedded = workload_of(parse([*RECIPE, *EMBEDDED])).whole()
    bases = [checkpoint_bytes(run, embedded, 2, shards=shards)["bases"] for shards in (1, 2)]
    assert bases == [6635520, 5087232]  # counted in the files of such runs
    llama, dense = get_workload("llama_1_8b").whole(), PlannedRun(DenseOptions(), "Muon")
    kinds = checkpoint_bytes(run, llama, 768)
    assert kinds["moments"] == checkpoint_bytes(dense, llama, 768)["moments"]
    assert kinds["unsent_update"] == kinds["parameters"]


def test_the_text_has_the_size_what_is_kept_and_the_time() -> None:
    model, vista = get_workload("llama_1_8b").whole(), get_machine("vista")
    kinds = checkpoint_bytes(PlannedRun(ScapeOptions(density=0.01)), model, 64)
    cost = CheckpointCost(kinds, 64, vista, Links.from_machine(vista))
    assert cost.total == pytest.approx(478e9, rel=0.01)
    assert cost.seconds == pytest.approx(cost.total / 10e9)  # the assumed file system; the links reach 3,200 GB/s
    text = cost.describe()
    assert "477.94 GB of all ranks" in text and "4.78 TB for the 10 that are kept" in text and "assumed" in text
    slow = replace(cost, links=cost.links.with_bandwidth("network", 0.1e9), saving=Saving(keep=10, count=3))
    assert slow.seconds == pytest.approx(cost.total / 6.4e9)
    assert "for the 3 that are kept" in slow.describe() and "6.4 GB/s, the links of 64 rank(s)" in slow.describe()
    copied = replace(cost, saving=Saving(keep=10, count=3, copies=1)).describe()
    assert f"{size_text(6 * cost.total)} for the 3 that are kept, with copies on 1 other node(s), and one" in copied
    assert "all are kept" in replace(cost, saving=Saving(keep=0)).describe()

"""Pipeline parallelism in real processes: two stages train as one, and resume bit for bit."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.marks import slow
from tests.pool import Pool
from tests.training import RECIPE
from tests.training import train as train_with_nan

COMMON = [
    *RECIPE,
    "--training.dataset=standard_library_short",
    "--training.steps=4",
    "--validation.no-enable",
    "--metrics.no-enable-tensorboard",
    "--debug.seed=5",
    "--parallelism.data_parallel_replicate_degree=2",
]
STAGES = ["--parallelism.pipeline_parallel_degree=2"]
ADAMW = "--optimizer.name=AdamW"
ONE_REPLICA = "--parallelism.data_parallel_replicate_degree=1"
METHODS = {
    "dense": ["--sync.method=dense", ADAMW],
    "scape": ["--sync.scape.density=0.1"],
    "quantized": ["--sync.method=quantized", ADAMW],
    "quantized_update": ["--sync.method=quantized_update", "--optimizer.name=Muon"],
    "sparta": ["--sync.method=sparta", "--sync.sparta.warmup_steps=1", ADAMW],
}
# Settings in which the layout changes the order of sums alone: an owner that keeps a quantization error, or selects a
# block of the mask, is another replica in another layout. (arguments, whether both replicas read the same data)
EQUAL = {
    "dense": ([*METHODS["dense"], "--training.global_batch_size=8", "--validation.enable"], False),
    "scape": (METHODS["scape"], True),
    "quantized": ([*METHODS["quantized"], "--sync.quantized.code=int8", "--sync.quantized.no-error-feedback"], False),
    "sparta": ([*METHODS["sparta"], "--sync.sparta.code=float32"], False),
    "sharded": (["--sync.method=dense", ONE_REPLICA, "--parallelism.data_parallel_shard_degree=2"], False),
    "tensor": (["--sync.method=dense", ONE_REPLICA, "--parallelism.tensor_parallel_degree=2"], False),
}
SAVING = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no-last-save-model-only"]


def train(folder: str, arguments: list[str], same_data: bool = False) -> dict[str, Any]:
    """Train, and return what each step logged and, by name, the whole parameters before and after."""
    from torch.distributed.tensor import DTensor

    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.core.parameters import plain_name
    from torchtitan_scape.data.datasets import build_dataloader
    from torchtitan_scape.trainer import specs
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    def read(**options: Any) -> Any:
        return build_dataloader(**(options | {"dp_rank": 0} if same_data else options))

    def parameters() -> dict[str, Tensor]:
        named = trainer.model_parts[0].named_parameters()
        return {plain_name(n): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named}

    with patch.object(specs, "build_dataloader", read):
        trainer = ScapeTrainer(parse([*COMMON, f"--job.dump_folder={folder}", *arguments]))
    metrics, losses, norms = trainer.metrics_processor, list[Any](), list[float]()
    log = metrics.log

    def keep(step: int, loss: float, max_loss: float, norm: float, extra_metrics: Any = None) -> None:
        log(step, loss, max_loss, norm, extra_metrics)
        losses.append(metrics.last_loss)
        norms.append(norm)

    initial = parameters()
    with patch("time.sleep"), patch.object(metrics, "log", keep):
        trainer.train()
    trainer.close()
    return {
        "initial": initial,
        "losses": losses,
        "norms": norms,
        "validation": getattr(getattr(trainer, "validator", None), "last_loss", None),
        "parameters": parameters(),
        "metrics": trainer.replica_optimizer.metrics(),
    }


def distance(run: dict[str, Tensor], stages: dict[str, Tensor]) -> float:
    """Return the largest relative L2 difference over the parameters of a stage."""
    return max(float((run[name] - own).norm() / run[name].norm()) for name, own in stages.items())


def share_apart(run: dict[str, Tensor], stages: dict[str, Tensor]) -> float:
    """Return the share of the entries of a stage that differ by more than rounding."""
    apart = sum(int(((run[name] - own).abs() > 1e-5).sum()) for name, own in stages.items())
    return apart / sum(own.numel() for own in stages.values())


@pytest.mark.parametrize("case", ["dense", "scape", slow("quantized"), "sparta", slow("sharded"), slow("tensor")])
def test_two_stages_train_as_one(case: str, pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    """Losses, norms, validation and parameters, to FP32 rounding, which may turn a code into the next one."""
    arguments, same_data = EQUAL[case]
    one = pool2(train, f"{tmp_path}/one", arguments, same_data, timeout=300)
    stages = pool4(train, f"{tmp_path}/stages", [*arguments, *STAGES], same_data, timeout=300)
    for rank, (run, base) in enumerate(zip(stages, [*one, *one], strict=True)):
        assert not run["initial"].keys() & stages[(rank + 2) % 4]["initial"].keys()
        assert run["initial"].keys() | stages[(rank + 2) % 4]["initial"].keys() == base["initial"].keys()
        assert distance(base["initial"], run["initial"]) == 0.0  # the seed of a stage is that of the whole model
        if case == "quantized":
            # Rounding may turn a code into the next one, and a block's scale in BF16, for all of its 128 entries.
            assert share_apart(base["parameters"], run["parameters"]) < 1e-2
        else:
            assert distance(base["parameters"], run["parameters"]) < 1e-5
        assert run["losses"] == pytest.approx(base["losses"], rel=1e-6)
        assert run["norms"] == pytest.approx(base["norms"], rel=1e-5)
        assert run["validation"] == (None if case != "dense" else pytest.approx(base["validation"], rel=1e-6))
        assert run["metrics"] == pytest.approx(base["metrics"], rel=1e-5)
    summaries = [json.loads(Path(tmp_path, name, "summary.json").read_text()) for name in ("one", "stages")]
    assert summaries[0]["tokens"] == summaries[1]["tokens"]
    assert summaries[1]["training_loss"] == stages[0]["losses"][-1]  # rank 0 writes it, and is not in the last stage
    if case == "dense":
        planned, dense = (summaries[1][f"{key}_bytes_per_step_and_rank"] for key in ("planned", "dense"))
        sent = sum(summaries[1]["bytes_sent_per_step_and_rank"].values())
        assert sent == pytest.approx(planned, rel=1e-3)
        assert dense == pytest.approx(summaries[0]["dense_bytes_per_step_and_rank"] / 2)


RESUMED = {
    "scape": [*METHODS["scape"], "--sync.scape.code=int4", "--sync.scape.update=sharded", *STAGES],
    "sparta": [*METHODS["sparta"], *STAGES],
    "quantized": [*METHODS["quantized"], *STAGES],
    "quantized_update": [
        *METHODS["quantized_update"],
        "--sync.quantized_update.whiten_every=1",
        "--sync.quantized_update.interval=2",
        *STAGES,
    ],
    "GPipe": [
        *("--sync.method=dense", "--training.mixed_precision_param=bfloat16", *STAGES),
        "--parallelism.pipeline_parallel_schedule=GPipe",
    ],
    # The first stage has no vectors, so that its optimizer has a single param group.
    "four stages": [
        *(*METHODS["scape"], "--optimizer.decay_exclude=vectors", "--training.local_batch_size=4"),
        *("--parallelism.pipeline_parallel_degree=4", ONE_REPLICA),
    ],
}


def resume(folder: str, arguments: list[str]) -> list[dict[str, Any]]:
    """Train four steps, and the last two again from the checkpoint of step 2."""
    runs = [[*arguments, *SAVING], [*arguments, *SAVING, "--checkpoint.load_step=2"]]
    return [train(folder, each) for each in runs]


@pytest.mark.parametrize(
    "case", ["scape", *map(slow, ("sparta", "quantized", "quantized_update", "GPipe", "four stages"))]
)
def test_a_resumed_run_of_stages_has_the_bits_of_an_uninterrupted_one(case: str, pool4: Pool, tmp_path: Path) -> None:
    for first, second in pool4(resume, str(tmp_path), RESUMED[case], timeout=300):
        assert second["losses"] == first["losses"][2:] and second["norms"] == first["norms"][2:]
        assert second["parameters"].keys() == first["parameters"].keys()
        assert all(torch.equal(second["parameters"][name], own) for name, own in first["parameters"].items())
        assert second["metrics"] == first["metrics"]


def test_stages_load_a_checkpoint_of_a_run_without_stages_and_the_other_way(
    pool1: Pool, pool2: Pool, tmp_path: Path
) -> None:
    arguments = [*METHODS["dense"], *SAVING, ONE_REPLICA]
    one = pool1(train, f"{tmp_path}/one", arguments)
    shutil.copytree(tmp_path / "one", tmp_path / "stages")
    stages = pool2(train, f"{tmp_path}/stages", [*arguments, *STAGES, "--checkpoint.load_step=2"], timeout=300)
    for run, base in zip(stages, [*one, *one], strict=True):
        assert run["losses"] == pytest.approx(base["losses"][2:], rel=1e-6)
        assert distance(base["parameters"], run["parameters"]) < 1e-5
    more = "--training.steps=5"  # from the checkpoint of step 4, which two stages or one have written
    for here, there in zip(
        *(pool1(train, f"{tmp_path}/{name}", [*arguments, more]) for name in ("one", "stages")), strict=True
    ):
        assert len(here["losses"]) == 1
        assert here["losses"] == pytest.approx(there["losses"], rel=1e-6)
        assert distance(here["parameters"], there["parameters"]) < 1e-5


def test_a_nan_in_the_last_stage_skips_the_step_on_all_stages(pool4: Pool, tmp_path: Path) -> None:
    arguments = [*COMMON, *METHODS["dense"], *STAGES]
    for run in pool4(train_with_nan, str(tmp_path), arguments, nan_at=2, timeout=300):
        assert run["skipped"] == 1

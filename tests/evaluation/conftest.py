"""Exported small models of each family, tasks with a few local documents, and the harness's registry."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

# Imports of TorchTitan are local, because this file is read before the device is selected.
FAMILIES = {
    "llama": [],
    "gpt2": ["--model.name=gpt2", "--model.flavor=tiny", "--training.seq_len=96", "--data.border=eos"],
}
CHOICES: list[dict[str, Any]] = [
    {"q": "The sea is", "choices": ["blue", "green as grass", "a very large stone"], "gold": 0},
    {"q": "Two and two are", "choices": ["four", "five"], "gold": 0},
    {"q": "Up is not", "choices": ["a side", "down"], "gold": 1},
]
CLOZES = ["A dog has four legs", "It rains cats and dogs", "def f(x): return x"]
# The first text is longer than a training sequence.
TEXTS = ["import os\n" * 30 + "print(os.sep)", "short", "é ü, and more of it"]
TASKS = {
    "local_choice": (
        "multiple_choice",
        "doc_to_text: 'Q: {{q}}'\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]\nmetadata: {version: 2.0}",
        CHOICES,
    ),
    "local_cloze": (
        "loglikelihood",
        """doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"\ndoc_to_target: "{{' '+text.split(' ')[-1]}}"\n"""
        "metric_list: [{metric: perplexity, aggregation: perplexity}, {metric: acc}]",
        [{"text": text} for text in CLOZES],
    ),
    "local_rolling": (
        "loglikelihood_rolling",
        "doc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: bits_per_byte}]",
        [{"text": text} for text in TEXTS],
    ),
}


@pytest.fixture(scope="session")
def model_of() -> Callable[[str], tuple[Any, dict[str, Tensor]]]:
    """Factory of a family's model with random weights, and the weights by name."""
    from tests.training import RECIPE
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.huggingface.folder import filled
    from torchtitan_scape.trainer.specs import whole_model

    def model_of(family: str) -> tuple[Any, dict[str, Tensor]]:
        spec, args, model = whole_model(parse([*RECIPE, *FAMILIES[family]]))
        generator = torch.Generator().manual_seed(1)
        values = {
            name: torch.ones(p.shape) if "norm" in name else 0.2 * torch.randn(p.shape, generator=generator)
            for name, p in model.named_parameters()
        }
        return filled(spec.model_cls, args, values), values

    return model_of


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, model_of: Any) -> dict[str, Path]:
    """An exported folder of each family."""
    import torch.distributed.checkpoint as dcp

    from tests.training import RECIPE
    from torchtitan_scape import export
    from torchtitan_scape.checkpoint.metadata import one_process
    from torchtitan_scape.checkpoint.storage import CheckedWriter

    parent = tmp_path_factory.mktemp("exported")
    for family, keys in FAMILIES.items():
        checkpoint = parent / f"{family}.checkpoint"
        checkpoint.mkdir()
        with one_process():
            dcp.save(
                model_of(family)[1], storage_writer=CheckedWriter(checkpoint), checkpoint_id=checkpoint, no_dist=True
            )
        recipe = ["--config", RECIPE[0].partition("=")[2], *RECIPE[1:], *keys]
        given = ["--checkpoint", str(checkpoint), "--output", str(parent / family), "--no-check"]
        assert export.main([*recipe, *given]) == 0
    return {family: parent / family for family in FAMILIES}


def write_task(folder: Path, name: str, kind: str, rows: list[dict[str, Any]], rest: str) -> None:
    """Write a task of the harness with its data."""
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / name}.jsonl}}}}\ntest_split: test\n"
    (folder / f"{name}.yaml").write_text(f"task: {name}\noutput_type: {kind}\n{source}{rest}\n")


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `TASKS`, and a task whose data do not exist."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, (kind, rest, rows) in TASKS.items():
        write_task(folder, name, kind, rows, rest)
    far = (folder / "local_cloze.yaml").read_text().replace("local_cloze\n", "far_away\n", 1)
    far = far.replace("path: json", "path: nobody/nothing").replace("dataset_kwargs", "metadata")
    (folder / "far_away.yaml").write_text(far)
    (folder / "group.yaml").write_text("group: local\ntask: [local_choice, local_rolling]\nnum_fewshot: 0\n")
    return folder


@pytest.fixture(scope="session")
def registry() -> Any:
    """Task manager with all tasks of the harness and of this project."""
    pytest.importorskip("lm_eval", reason="the extra eval, with the lm-evaluation-harness, is not installed")
    from lm_eval.tasks import TaskManager

    from torchtitan_scape.evaluation.harness import TASKS

    return TaskManager(include_path=[TASKS])

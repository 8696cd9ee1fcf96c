"""Checkpoints with a record of format 2, which has earlier keys of options, resume exactly and report no difference."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.checkpoint.runs import run
from tests.pool import Pool
from tests.replica.own_loop import make_model, make_optimizer, through_a_file, train, weights
from tests.training import LAYOUTS, METHODS
from torchtitan_scape.checkpoint.metadata import RunMetadata
from torchtitan_scape.core.renamed_keys import RENAMED_KEYS

OPTIONS: dict[str, dict[str, Any]] = {
    "scape": {"density": 0.3, "block_size": 64, "code": "int4", "update": "sharded"},
    "topk": {"density": 0.1, "code": "2bit"},
    "sparseloco": {"code": "e2m1"},
}
_INT8 = ["--sharding.weights_code=int8", "--sharding.gradients_code=int8"]
TRAINERS = {
    "scape": [*METHODS["scape-gather-2bit"], *LAYOUTS["1x2"]],
    "demo": [*METHODS["demo"], *LAYOUTS["1x2"]],
    "sharding": [*METHODS["adamw"], *LAYOUTS["2x1"], *_INT8],
}


def with_earlier_keys(values: dict[str, Any], section: str) -> dict[str, Any]:
    """Return the values of a section with the keys that encodings had in format 2."""
    earlier = {name: key for key, name in reversed(RENAMED_KEYS.get(section, {}).items()) if name.endswith("code")}
    nested = {k: with_earlier_keys(v, f"{section}.{k}") if isinstance(v, dict) else v for k, v in values.items()}
    return {earlier.get(key, key): value for key, value in nested.items()}


def saving_format_2() -> Any:
    """Return a context in which checkpoints have a record of format 2."""
    state_dict = RunMetadata.state_dict

    def earlier(self: RunMetadata) -> dict[str, Any]:
        values = json.loads(state_dict(self)["json"])
        values = with_earlier_keys(values, f"sync.{values['method']}") | {"format": 2}
        if "sharding" in values:
            values["sharding"] = with_earlier_keys(values["sharding"], "sharding")
        return {"json": json.dumps(values)}

    return patch.object(RunMetadata, "state_dict", earlier)


def own_loop(folder: str, method: str) -> tuple[str, bool, bool]:
    """Return the text about the loaded state, and whether a run is equal that resumed with DCP, and with torch.save."""
    from torchtitan_scape import checkpoint_states, load_checkpoint

    model, options = make_model(), OPTIONS[method]
    optimizer = make_optimizer(model, method, options=options)
    train(model, optimizer, range(6))
    with saving_format_2():
        dcp.save(checkpoint_states(model, optimizer), checkpoint_id=folder)
    of_rank, of_model = through_a_file([optimizer.state_dict(), model.state_dict()])
    of_rank["replica"]["layout"] = with_earlier_keys(of_rank["replica"]["layout"], f"sync.{method}")
    assert "code" not in of_rank["replica"]["layout"]

    def end(model: Any, optimizer: Any) -> Tensor:
        train(model, optimizer, range(6, 12))
        optimizer.finish_previous_step()
        return weights(model)

    expected, model = end(model, optimizer), make_model(1)
    optimizer = make_optimizer(model, method, options=options)
    text = load_checkpoint(folder, model, optimizer)
    through_dcp = torch.equal(end(model, optimizer), expected)
    model = make_model(2)
    model.load_state_dict(of_model)
    optimizer = make_optimizer(model, method, options=options)
    optimizer.load_state_dict(of_rank)
    return text, through_dcp, torch.equal(end(model, optimizer), expected)


@pytest.mark.parametrize("method", OPTIONS)
def test_own_loops_resume_exactly(method: str, pool2: Pool, tmp_path: Path) -> None:
    for text, through_dcp, of_rank in pool2(own_loop, str(tmp_path), method):
        assert through_dcp and of_rank and "differs" not in text, text


def trainer(folder: str, arguments: list[str]) -> tuple[list[str], bool]:
    """Return the log line about the checkpoint, and whether the resumed run is equal to one without interruption."""

    def look(trainer: Any) -> dict[str, Any]:
        return {str(i): parameter.detach().clone() for i, parameter in enumerate(trainer.model_parts[0].parameters())}

    whole = run(f"{folder}/whole", arguments, 9, look)
    with saving_format_2():
        run(f"{folder}/saved", arguments, 6, look)
    dist.barrier()
    resumed = run(f"{folder}/saved", arguments, 9, look)
    equal = all(torch.equal(_local(a), _local(resumed["after"][key])) for key, a in whole["after"].items())
    return resumed["resume_lines"], equal and whole["loss"] == resumed["loss"]


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("name", TRAINERS)
def test_the_trainer_resumes_exactly(name: str, pool2: Pool, tmp_path: Path) -> None:
    lines, equal = pool2(trainer, str(tmp_path), TRAINERS[name])[0]
    assert equal and len(lines) == 1 and "differ" not in lines[0], lines

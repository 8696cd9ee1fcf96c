"""What a checkpoint was saved by, so that another layout is refused before anything is read."""

import json
import os
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import CheckpointManager

from topology.layout import Layout
from torchtitan_scape.job_config import JobConfig

RECORD = "scape_layout"
# What records say that were saved before the key existed.
_OLDER = {"simulate_replicas": 1, "parameters": "local", "values_dtype": "float32", "weights_dtype": "float32"}


class LayoutRecord(Stateful):
    """The layout and method of the run that saves: per-replica state fits no other yet."""

    def __init__(self, layout: Layout, config: JobConfig) -> None:
        scape = config.sync.scape
        self.values: dict[str, Any] = {
            "ranks": layout.world_size,
            "replicate": layout.replicate,
            "shard": layout.shard,
            "context": layout.context,
            "tensor": layout.tensor,
            "simulate_replicas": config.topology.simulate_replicas,
            "model": f"{config.model.name} {config.model.flavor}",
            "method": config.sync.method,
            "optimizer": config.optimizer.name,
        }
        if config.sync.method == "scape":
            self.values |= {
                "density": scape.density,
                "density_warmup_steps": scape.density_warmup_steps,
                "block_size": scape.block_size,
                "selection": scape.selection,
                "dense_names": sorted(scape.dense_names),
                "wait_scaling": scape.wait_scaling,
                # Without wait scaling these do nothing.
                "wait_by": scape.wait_by if scape.wait_scaling else None,
                "keep_moment": scape.keep_moment if scape.wait_scaling else None,
                "wire_dtype": scape.wire_dtype,
                "parameters": scape.parameters,
                "values_dtype": scape.values_dtype,
                "weights_dtype": scape.weights_dtype,
                # Who selects in which run follows from these.
                "exchange": config.topology.exchange,
                "ranks_per_node": layout.ranks_per_node,
            }

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(self.values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take back: `check_resume` has compared it."""


def check_resume(checkpointer: CheckpointManager, step: int, record: LayoutRecord) -> None:
    """Compares the checkpoint that is about to be loaded with this run. A collective call.

    Raises ValueError that names the first difference, or says that the checkpoint cannot be resumed from.
    """
    if not checkpointer.enable:
        return
    if os.path.isdir(checkpointer.folder):
        step = checkpointer._find_load_step() if step == -1 else step
        if step <= 0:
            return
        path = checkpointer._create_checkpoint_id(step)
        if not os.path.isdir(path):
            raise ValueError(f"checkpoint.load_step = {step}, but there is no {path}")
    elif step != -1:
        raise ValueError(f"checkpoint.load_step = {step}, but there is no {checkpointer.folder}")
    elif checkpointer.initial_load_path and not checkpointer.initial_load_model_only:
        path = checkpointer.initial_load_path
        if not os.path.isfile(os.path.join(path, ".metadata")):
            raise ValueError(f"checkpoint.initial_load_path = {path!r} is no checkpoint folder")
    else:
        return
    metadata = dcp.FileSystemReader(path).read_metadata()
    if not any(key.startswith("optimizer") for key in metadata.state_dict_metadata):
        raise ValueError(
            f"{path} holds the model alone, so training cannot go on from it; name an earlier step with "
            "--checkpoint.load_step, or start a new run in another --job.dump_folder. (A run whose last checkpoint "
            "shall be resumed from needs checkpoint.last_save_model_only = false)"
        )
    if f"{RECORD}.json" not in metadata.state_dict_metadata:
        raise ValueError(
            f"{path} was not saved by this project; start from its model with checkpoint.initial_load_path"
        )
    saved: dict[str, Any] = {RECORD: {"json": ""}}
    dcp.load(saved, checkpoint_id=path)
    theirs = json.loads(saved[RECORD]["json"])
    for key, value in record.values.items():
        if (saved_value := theirs.get(key, _OLDER.get(key))) != value:
            raise ValueError(
                f"{path} was saved with {key} = {saved_value!r}, this run has {value!r}; resuming on another "
                "layout or method is not supported: start it as it was saved, or in another --job.dump_folder"
            )

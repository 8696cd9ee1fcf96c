"""Checks of the folders that a run writes to."""

import os
from pathlib import Path

from torchtitan_scape.config.job_config import JobConfig


def check_folders(config: JobConfig) -> None:
    """Check that the run may write to its folders. Nothing is created.

    Raises:
        ValueError: A folder, or the nearest existing one above it, is a file or cannot be written to.
    """
    metrics, profiling, checkpoint = config.metrics, config.profiling, config.checkpoint
    folders = {
        "metrics.save_tb_folder": (metrics.save_tb_folder, metrics.enable_tensorboard or metrics.enable_wandb),
        "comm.save_traces_folder": (config.comm.save_traces_folder, config.comm.trace_buf_size > 0),
        "profiling.save_traces_folder": (profiling.save_traces_folder, profiling.enable_profiling),
        "profiling.save_memory_snapshot_folder": (
            profiling.save_memory_snapshot_folder,
            profiling.enable_memory_snapshot,
        ),
        "checkpoint.folder": (checkpoint.folder, checkpoint.enable and not checkpoint.load_only),
    }
    _check("job.dump_folder", Path(config.job.dump_folder))
    for key, (name, used) in folders.items():
        if used:
            _check(key, Path(config.job.dump_folder, name))


def _check(key: str, folder: Path) -> None:
    existing = Path(os.path.abspath(folder))
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        reason = f"{existing} is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        reason = f"{existing} is not writable for this user"
    else:
        return
    raise ValueError(f"{key}: nothing can be written to {folder}: {reason}; set --{key} to another folder")

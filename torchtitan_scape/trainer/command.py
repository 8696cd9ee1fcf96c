"""One rank's run of the trainer: parse, build, train, and end with one line and an exit code. See `train`."""

import logging
import sys
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan_scape.config.parsing import resolve
from torchtitan_scape.core.consistency import DamagedParametersError, ReplicasDifferError
from torchtitan_scape.core.device_check import check_device
from torchtitan_scape.planner.configured import saving_of
from torchtitan_scape.replica.guard import NonFiniteGradientError
from torchtitan_scape.report.summary import report_dry_run
from torchtitan_scape.runtime.folder_lock import FolderLock
from torchtitan_scape.runtime.shutdown import Shutdown
from torchtitan_scape.titan import DEVICE_TYPE, device
from torchtitan_scape.titan.trainer import init_logger
from torchtitan_scape.topology.torch_version import untested
from torchtitan_scape.trainer.layout import is_dry_run
from torchtitan_scape.trainer.trainer import ScapeTrainer

logger = logging.getLogger(__name__)

# Errors that a user can fix are logged in one line; all others with a traceback.
USER_ERRORS = (ValueError, FileNotFoundError, NonFiniteGradientError, ReplicasDifferError, DamagedParametersError)


def run(arguments: list[str], shutdown: Shutdown) -> None:
    """Parse the arguments, build the trainer and train; a dry run only builds."""
    resolved = resolve(arguments)
    config = resolved.config
    logger.info(resolved.line())
    for line in resolved.unused():
        logger.warning(line)
    shutdown.set_collective_timeout(config.comm.init_timeout_seconds)
    if DEVICE_TYPE == "cpu" and config.comm.mode != "fake_backend":
        # Simulated replicas of another machine may run on any CPU.
        check_device("local" if config.topology.simulate_replicas > 1 else config.topology.machine)
    saving = saving_of(config)
    if is_dry_run(config):
        config.validation.enable = config.checkpoint.enable = False
        config.debug.seed = config.debug.seed or 0
    lock = FolderLock(config.job.dump_folder) if shutdown.rank == 0 and not is_dry_run(config) else None
    try:
        trainer = ScapeTrainer(config)
    except BaseException:
        if lock is not None:
            lock.release()
        for folder in (Path(config.job.dump_folder, config.comm.save_traces_folder), Path(config.job.dump_folder)):
            with suppress(OSError):  # TorchTitan creates them before its checks; remove them if they are empty
                folder.rmdir()
        raise
    shutdown.attach(trainer)
    if is_dry_run(config):
        report_dry_run(trainer, saving)
        return
    if dist.get_rank() == 0:
        # Not before: a start whose load is refused, or which has no step left, is not the run of this folder.
        trainer.before_first_step = lambda: resolved.write(config.job.dump_folder)
    if config.checkpoint.create_seed_checkpoint:
        trainer.before_first_step()
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        trainer.train()
    if lock is not None:
        lock.release()


@record
def main() -> None:
    init_logger()
    if DEVICE_TYPE == "cpu":
        device.quieten_cpu()
    if warning := untested(torch.__version__):
        logger.warning(warning)
    shutdown = Shutdown()  # before parsing, because a rank that cannot read its recipe must end the others
    shutdown.run(lambda: run(sys.argv[1:], shutdown), USER_ERRORS)

"""TorchTitan's trainer components: checkpoints, optimizers, schedules, metrics, validation, loss."""

from torchtitan.components.checkpoint import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, AsyncMode, CheckpointManager
from torchtitan.components.loss import IGNORE_INDEX, build_cross_entropy_loss
from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.validate import Validator

__all__ = [
    "DATALOADER",
    "IGNORE_INDEX",
    "LR_SCHEDULER",
    "MODEL",
    "OPTIMIZER",
    "AsyncMode",
    "CheckpointManager",
    "LRSchedulersContainer",
    "MetricsProcessor",
    "OptimizersContainer",
    "Validator",
    "build_cross_entropy_loss",
    "build_lr_schedulers",
]

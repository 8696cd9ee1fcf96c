"""TorchTitan's trainer components: checkpoints, optimizers, schedules, metrics, validation, loss."""

from importlib import import_module

from torchtitan.components.checkpoint import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, AsyncMode, CheckpointManager
from torchtitan.components.loss import IGNORE_INDEX, LossFunction, build_cross_entropy_loss
from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.validate import Validator


def model_converters() -> set[str]:
    """Return the names that `[model] converters` may contain."""
    for module in ("float8", "mx"):  # They register themselves.
        import_module(f"torchtitan.components.quantization.{module}")
    from torchtitan.protocols.model_converter import _registry_model_converter_cls

    return set(_registry_model_converter_cls)

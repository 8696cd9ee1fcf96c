"""TorchTitan's configuration sections and their parser."""

from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig, Optimizer
from torchtitan.config.job_config import ActivationCheckpoint, Checkpoint, Model, Training, Validation
from torchtitan.config.manager import custom_registry

__all__ = [
    "TORCH_DTYPE_MAP",
    "ActivationCheckpoint",
    "Checkpoint",
    "ConfigManager",
    "JobConfig",
    "Model",
    "Optimizer",
    "Training",
    "Validation",
    "custom_registry",
]

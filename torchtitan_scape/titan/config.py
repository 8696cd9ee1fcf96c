"""TorchTitan's configuration sections and their parser."""

from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig, Optimizer
from torchtitan.config.job_config import ActivationCheckpoint, Checkpoint, Model, Training, Validation

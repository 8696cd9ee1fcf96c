"""TorchTitan's trainer and logger."""

from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

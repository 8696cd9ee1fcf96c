"""TorchTitan's pipeline parallelism: division of a model into stages, and PyTorch's schedules."""

from torchtitan.components.loss import LossFunction
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part, pipeline_llm

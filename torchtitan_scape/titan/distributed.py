"""TorchTitan's device, process groups, meshes, and parallelism within a replica, pipelines included."""

from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part, pipeline_llm
from torchtitan.distributed.tensor_parallel import maybe_enable_async_tp
from torchtitan.distributed.utils import init_distributed, set_pg_timeouts
from torchtitan.tools.utils import device_module, device_type

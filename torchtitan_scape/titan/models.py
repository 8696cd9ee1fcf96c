"""TorchTitan's Llama 3, model protocols, and model registry."""

from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, llama3_args, parallelize_llama
from torchtitan.models.llama3 import get_train_spec as llama3_train_spec
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list as SAVED_OPERATIONS
from torchtitan.models.llama3.infra.parallelize import apply_compile, disable_fsdp_gradient_division
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.protocols import train_spec
from torchtitan.protocols.model import AttentionMasksType, BaseModelArgs, ModelProtocol
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec

"""TorchTitan's Llama in this project's sizes."""

from functools import partial

import torch

from torchtitan_scape.models.initial import initialize
from torchtitan_scape.titan.models import RoPEScalingArgs, Transformer, TransformerModelArgs

# Llama 3.1's scaling of the rotary frequencies is off, because none of these models was trained with it.
_sizes = partial(TransformerModelArgs, rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0))

LLAMA_ARGS = {
    # 2.2 M parameters: trains in two minutes on two CPU cores.
    "embedded": _sizes(dim=128, n_layers=6, n_heads=4, n_kv_heads=2, vocab_size=4096, multiple_of=64),
    # 200,720 parameters on bytes (256 and two special tokens, two unused rows): for studies of many short runs.
    "study": _sizes(dim=80, n_layers=2, n_heads=2, n_kv_heads=2, vocab_size=260, multiple_of=32),
    # 51.9 M parameters, 46.7 M of them in layers, for the embedded tokenizer: trains in a minute on one GPU.
    "50M": _sizes(dim=640, n_layers=10, n_heads=10, n_kv_heads=5, vocab_size=4096),
    # The SCAPE paper's models (Section V): the shapes of H2O-Danube3-500M and H2O-Danube-1.8B.
    "500M": _sizes(dim=1536, n_layers=16, n_heads=16, n_kv_heads=8, vocab_size=32000, rope_theta=100000),
    "1.8B": _sizes(dim=2560, n_layers=24, n_heads=32, n_kv_heads=8, vocab_size=32000, rope_theta=10000),
    # Sizes are those of [model.sizes] alone.
    "custom": _sizes(),
    # For dry runs: layers, width, heads, vocabulary and parameter count of GPT-NeoX-20B (arXiv:2204.06745), untied.
    # Its feed-forward has two matrices of width 24576, this one has three of width 16384.
    "20B": _sizes(dim=6144, n_layers=44, n_heads=64, vocab_size=50432),
}


class Llama(Transformer):
    """TorchTitan's Llama, on a CPU with the same initial weights in every layout."""

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        initialize(self, lambda: super(Llama, self).init_weights(buffer_device), self._drawn)

    def _drawn(self) -> Transformer:
        with torch.device("cpu"):
            whole = Transformer(self.model_args)
        whole.init_weights()
        return whole

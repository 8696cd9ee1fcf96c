"""TorchTitan's Llama at our sizes."""

from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.model.args import RoPEScalingArgs

from torchtitan_scape.sync.shards import local, plain_name

# Llama 3.1's stretching of the rotary frequencies is off: none of these models was trained with it.
_sizes = partial(TransformerModelArgs, rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0))

LLAMA_ARGS = {
    # 2.2 M parameters: what two CPU cores train in two minutes.
    "embedded": _sizes(dim=128, n_layers=6, n_heads=4, n_kv_heads=2, vocab_size=4096, multiple_of=64),
    # 200,720 parameters on bytes (256 and two special tokens, four rows spare): for studies of many short runs.
    "study": _sizes(dim=80, n_layers=2, n_heads=2, n_kv_heads=2, vocab_size=260, multiple_of=32),
    # The SCAPE paper's models (Section V): the shapes of H2O-Danube3-500M and H2O-Danube-1.8B.
    "500M": _sizes(dim=1536, n_layers=16, n_heads=16, n_kv_heads=8, vocab_size=32000, rope_theta=100000),
    "1.8B": _sizes(dim=2560, n_layers=24, n_heads=32, n_kv_heads=8, vocab_size=32000, rope_theta=10000),
}


class Llama(Transformer):
    """TorchTitan's Llama, which starts from the same weights in every layout on a CPU too.

    DTensor draws no random numbers on a CPU: every rank would fill its shard from the same seed, so that all
    shards are alike. There each rank draws the whole model and keeps its part, which bounds the size of
    models to the host's memory; a GPU keeps TorchTitan's own way.
    """

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        parameters = dict(self.named_parameters())
        first = next(iter(parameters.values()))
        if first.device.type != "cpu":
            super().init_weights(buffer_device)
            return
        if isinstance(local(first), FakeTensor):
            return  # a dry run has no values
        with torch.device("cpu"):
            whole = Transformer(self.model_args)
        whole.init_weights()
        self.freqs_cis = whole.freqs_cis
        values = dict(whole.named_parameters())
        for name, parameter in parameters.items():
            full = values[plain_name(name)]
            local(parameter).copy_(_local_part(full, parameter) if isinstance(parameter, DTensor) else full)


def _local_part(full: Tensor, like: DTensor) -> Tensor:
    """This rank's part of `full`, laid out as `like`.

    The innermost mesh axis cuts first: FSDP shards what tensor parallelism left on this rank.
    """
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    part = full
    for axis in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[axis]
        if placement.is_replicate():
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        pieces = part.chunk(like.device_mesh.size(axis), dim)
        index = coordinate[axis]
        part = pieces[index] if index < len(pieces) else part.narrow(dim, 0, 0)
    return part

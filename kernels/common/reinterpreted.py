"""Tensors whose bytes kernels read as another dtype."""

import torch
from torch import Tensor
from triton.runtime.jit import TensorWrapper


class Reinterpreted(TensorWrapper):
    """A contiguous tensor as an argument of a kernel with pointers to another dtype.

    Unlike `Tensor.view(dtype)` it calls no operator of PyTorch.
    """

    def __init__(self, base: Tensor, dtype: torch.dtype) -> None:  # without the view that the superclass creates
        self.base, self.dtype, self.device, self.shape = base, dtype, base.device, base.shape

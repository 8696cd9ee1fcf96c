"""Tensors of any shape and floating-point dtype as flat FP32 ones, for the PyTorch passes."""

from torch import Tensor


class Flat:
    """A tensor as FP32 (n,) to write to; `store` takes back what is no view of it.

    master: what is written to instead, and the tensor is a copy of. Without one a BF16 parameter loses updates that are
    smaller than its rounding.
    """

    def __init__(self, tensor: Tensor, master: Tensor | None = None) -> None:
        self._tensor = tensor
        self.flat = tensor.float().contiguous().view(-1) if master is None else master

    def store(self) -> None:
        if self.flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self.flat.view(self._tensor.shape))

"""Flat FP32 views or copies of tensors of any shape and floating-point dtype, for the PyTorch passes."""

from torch import Tensor


class Flat:
    """A tensor as writable FP32 (n,), a view if possible. `store` copies the result back if it is not a view.

    master: FP32 (n,) weights that are updated instead; the tensor is their copy in another dtype. Without a master, a
        BF16 parameter loses updates that are smaller than its rounding error.
    """

    def __init__(self, tensor: Tensor, master: Tensor | None = None) -> None:
        self._tensor = tensor
        self.flat = tensor.float().contiguous().view(-1) if master is None else master

    def store(self) -> None:
        """Copy the values to the tensor, unless `flat` is a view of it."""
        if self.flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self.flat.view(self._tensor.shape))

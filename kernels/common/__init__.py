"""Shared parts of the kernels: PyTorch passes, launches over many tensors, tiles, state in host memory."""

"""Shared parts of the kernels: launches over many tensors, tiles, state in host memory."""

"""What kernels share: launches over many tensors, tiles, tensors kept in host memory."""

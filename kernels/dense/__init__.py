"""Norms, scaling and the elementwise steps of optimizers: PyTorch, Triton."""

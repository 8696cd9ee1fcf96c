"""Passes of dense AdamS and the finite check: PyTorch, Triton."""

"""Passes of a SCAPE step: reference, PyTorch, Triton."""

"""Passes of a coded exchange on the tensors themselves, without a buffer for their values: Triton."""

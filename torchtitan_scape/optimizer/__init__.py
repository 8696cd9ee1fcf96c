"""Optimizers that own the replicate axis, and what they are made of."""

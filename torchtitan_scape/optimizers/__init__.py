"""The optimizers and what they cost."""

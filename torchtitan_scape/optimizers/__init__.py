"""Optimizers and their cost."""

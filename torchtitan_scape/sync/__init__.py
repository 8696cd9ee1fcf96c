"""Gradient-space methods: they take a replica's gradients and give the synchronised ones, in place."""

"""Gradients in few bits to the owner of a parameter, and its update in few bits back to all replicas."""

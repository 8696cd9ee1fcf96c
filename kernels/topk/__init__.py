"""Passes of top-k and DeMo: selection in tiles, error feedback, and the mean of sparse messages."""

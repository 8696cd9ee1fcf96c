"""Checkpoints: their content, their integrity, and loading into the same or another layout."""

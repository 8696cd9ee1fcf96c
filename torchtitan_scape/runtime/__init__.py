"""The life of a run: its launch, the liveness of its ranks, its end, what ranks agree on at the start."""

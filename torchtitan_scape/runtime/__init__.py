"""Process lifetime of a run: launch, liveness of ranks, shutdown, and comparison of ranks at the start."""

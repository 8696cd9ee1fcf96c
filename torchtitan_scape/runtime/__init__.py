"""Process lifetime of a run: launch, liveness of ranks, shutdown, and agreement of ranks at the start."""

"""One replica's optimizer step: guard, synchronization, clipping, update, and simulated replicas."""

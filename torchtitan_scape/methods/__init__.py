"""Synchronization methods of the replicate axis: the interface, the registry and one folder per method."""

"""The shard axis: what stands in for FSDP2's own collectives, and what all of that has in common."""

"""The shard axis: replacements for FSDP2's own collectives."""

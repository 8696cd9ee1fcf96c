"""Training loops without TorchTitan that synchronize their replicas with `torchtitan_scape.replicate`."""

"""Building blocks without TorchTitan: parameter shards, options, timing, consistency checks, BF16 weights, files."""

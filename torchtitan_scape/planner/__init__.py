"""Whether to compress, before a cluster is booked: workloads, cost, fit and advice, with two commands on top."""

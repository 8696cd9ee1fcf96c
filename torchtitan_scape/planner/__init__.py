"""Whether to compress, before a cluster is booked: workloads, cost, fit, advice; `plan` and "
"`preflight` are commands."""

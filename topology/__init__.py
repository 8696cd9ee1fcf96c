"""Cluster topology and collectives: rank layout, process groups, hierarchical exchanges, byte counts and link costs.

`layout` and `machines` are plain arithmetic. `groups` creates the process groups of a layout. `collectives` defines the
interface between methods and communication; `stages` executes its exchanges level by level on a `comm_stream`.
`links` and `ring_bytes` compute the cost of the same exchanges. The package does not depend on the trainer.
"""

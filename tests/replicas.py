"""N replicas in one process: the product's own endpoints, with chunks so small that little models have several."""

from collections.abc import Callable
from typing import Any

from topology.in_process import InProcessCollectives, SimulatedReplicas

ThreadCollectives = InProcessCollectives


def run_replicas(replicas: int, work: Callable[[InProcessCollectives], Any]) -> list[Any]:
    """Runs `work(collectives)` as every replica and returns the results; raises the first error.

    Each has parameters of its own, which it writes.
    """
    simulated = SimulatedReplicas(replicas) if replicas > 1 else None
    if simulated is None:
        from topology.process_groups import ProcessGroupCollectives

        return [work(ProcessGroupCollectives(None))]  # type: ignore[arg-type]
    for endpoint in simulated.endpoints:
        endpoint.is_writer, endpoint.chunk_entries, endpoint.min_columns = True, 64, 7
    return simulated.run(lambda replica: work(simulated.endpoints[replica]))

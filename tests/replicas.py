"""N replicas in one process, with the product's in-process collectives. Chunks are small: tiny models have several."""

from collections.abc import Callable
from typing import Any

from torchtitan_scape.topology.in_process import InProcessCollectives, SimulatedReplicas

ThreadCollectives = InProcessCollectives


def run_replicas(replicas: int, work: Callable[[InProcessCollectives], Any], chunk_entries: int = 64) -> list[Any]:
    """Run `work(collectives)` once for each replica and return the results in replica order.

    Each replica has its own parameters and updates them. A message has chunks of `chunk_entries`, each of which needs
    about a millisecond of CPU time. The error of the first replica that raises is raised.
    """
    simulated = SimulatedReplicas(replicas) if replicas > 1 else None
    if simulated is None:
        from torchtitan_scape.topology.collectives import ReplicaCollectives

        return [work(ReplicaCollectives(None))]  # type: ignore[arg-type]
    for endpoint in simulated.endpoints:
        endpoint.is_writer, endpoint.chunk_entries, endpoint.min_columns = True, chunk_entries, 7
    return simulated.run(lambda replica: work(simulated.endpoints[replica]))

"""Loading a checkpoint's optimizer state into a replica optimizer, whatever method saved it."""

from torchtitan_scape.checkpoint.local_migration import load_local
from torchtitan_scape.checkpoint.migration import load_synced
from torchtitan_scape.checkpoint.state import dense_state, load_dense_state
from torchtitan_scape.methods.pending import CheckpointReader
from torchtitan_scape.replica.optimizer import ReplicaOptimizer


def load(optimizer: ReplicaOptimizer, reader: CheckpointReader, same_layout: bool, step: int) -> str:
    """Load a checkpoint's state, saved by this method and layout or by others. Collective; load the model first.

    Args:
        same_layout: method and layout are those of the run that saved.
        step: of the checkpoint.

    Returns:
        A summary for the log.
    """
    methods, device = optimizer.methods, optimizer.grad_norm.device
    optimizer.finish_previous_step()
    sharding_states = optimizer.sharding.unsent.loading(reader, optimizer.shards())
    # Format 1 stores the counter among the values of a method that performs the update itself.
    records = [reader.saved, *(value for value in reader.saved.values() if isinstance(value, dict))]
    counted = [record["attempted_steps"] for record in records if "attempted_steps" in record]
    optimizer.attempted_steps = counted[0] if counted else step
    if methods[0].holds_optimizer_state:
        return methods[0].load_each(methods, reader, same_layout, step)  # type: ignore[attr-defined]
    if optimizer.weights:
        summary, incomplete = load_local(optimizer.weights, methods, device, reader, same_layout)
    else:
        state = dense_state(optimizer)

        def read_optimizer() -> None:
            reader.fill(state)
            load_dense_state(optimizer, state)

        each = [method.states() for method in methods]
        each[0] = [*each[0], *sharding_states]
        summary, incomplete = load_synced(
            optimizer.inner, each, optimizer.collectives, device, reader, same_layout, read_optimizer
        )
    if incomplete:
        optimizer.request_full_exchange()
    return summary

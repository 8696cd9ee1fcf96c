"""Figures of a replica optimizer's last step."""

from typing import Any


def stats(optimizer: Any) -> dict[str, float]:
    """Return figures of the last step without communication, so that any rank may call it alone.

    Keys: those of `metrics`, as values of this rank: "residual_norm", for example, is the norm of its own replica and
    shard. "grad_norm" and "clip_factor", which the step computes over the whole model; "steps"; and per step and rank
    "sent_bytes" and "dense_bytes", counted from the start or from the last `load_checkpoint`.

    Args:
        optimizer: a `ReplicaOptimizer`.
    """
    sent = sum(optimizer.collectives.ledger.sent.values())
    return metrics(optimizer, local=True) | {
        "grad_norm": optimizer.grad_norm.item(),
        "steps": float(optimizer.attempted_steps),
        "sent_bytes": sent / max(1, optimizer.attempted_steps - optimizer._counted_from),
        "dense_bytes": optimizer.dense_bytes(),
    }


def metrics(optimizer: Any, local: bool = False) -> dict[str, float]:
    """Return the figures of the last step for the log. Collective unless `local`.

    Keys: "density", "residual_norm" if the method has a residual, "clip_factor", "skipped_steps", and the method's own.

    Args:
        optimizer: a `ReplicaOptimizer`.
        local: use the values of this rank instead of those of all ranks.
    """
    figures: dict[str, float] = optimizer.replicas.run(lambda i: optimizer.methods[i].metrics(local))[0]
    if (squares := optimizer.sharding.unsent.squares()) is not None:
        total = squares if local else optimizer.collectives.sum_over_all(squares)
        figures["residual_norm"] = total.item() ** 0.5
    return figures | {"clip_factor": optimizer.clip_factor.item(), "skipped_steps": float(optimizer.guard.skipped)}

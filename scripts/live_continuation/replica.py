"""One replica of the prototype: a plain loop, whose exchanges choose their participants.

A replica takes its inner steps without the others. At the end of a round `synchronize` agrees on the participants,
forms a process group of them if they have changed, exchanges, and votes. If a participant is lost, all others go back
to the state before the exchange and try again with those that are left, so no inner step is lost. A replica that was
started again receives the state between two rounds.
"""

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from scripts.examples.nanogpt_loop import GPT, GPTLayer, batch
from scripts.live_continuation.membership import Arrival, Membership
from torchtitan_scape import DilocoOptions, NolocoOptions, ReplicaOptimizer, replicate
from torchtitan_scape.methods.base import LocalMethod
from torchtitan_scape.methods.interface import StepInfo
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.groups import ReplicaGroups

# `ReplicaOptimizer.step` never exchanges; `synchronize` does, with this multiple of the number of the round.
NEVER = 1 << 40
METHODS: dict[str, type[MethodOptions]] = {"diloco": DilocoOptions, "noloco": NolocoOptions}
HELD_OUT, EVALUATED = 100_000, 32  # bytes of text, batches
RATE, MAX_NORM = 2e-3, 1.0
TIMEOUT = timedelta(seconds=10)


class LiveCollectives(ReplicaCollectives):
    """Collectives of the present participants. Replicas do not wait for each other in a step.

    Attributes:
        started: called after an exchange has started.
    """

    started: Callable[[], None] = staticmethod(lambda: None)

    def minimum_over_all(self, values: Tensor) -> Tensor:
        """Check the gradients of this replica alone; the others skip no step for it."""
        return self._minimum_over_model(values)

    def _all_reduce(self, *arguments: Any) -> Any:
        handle = super()._all_reduce(*arguments)
        self.started()
        return handle

    def _pair_mean(self, *arguments: Any) -> Any:
        handle = super()._pair_mean(*arguments)
        self.started()
        return handle


class Replica:
    """The model, its optimizer and the position in the run.

    Attributes:
        names: participants of the process group, in rank order; () without a group.
        round: exchanges that the weights contain; -1 for a process that has no state yet.
        position: batches that were given out before this round. Step s of the round reads number
            `position + s * len(names) + rank`.
        trained: batches whose displacements were applied.
    """

    def __init__(self, name: str, membership: Membership, text: Tensor, args: argparse.Namespace) -> None:
        self.name, self.membership, self.inner_steps = name, membership, args.inner_steps
        self._text, self.model = text, new_model()
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self.options = METHODS[args.method](inner_steps=NEVER)
        self.names: list[str] = []
        self.round, self.position, self.trained = (-1 if args.joins else 0), args.seed << 32, 0
        self._ends, self._quorum = False, -1
        self.optimizer = self._build(None)

    # ------------------------------------------------------------------------------------------- training

    def run(self, target: int) -> None:
        """Train until the displacements of `target` batches were applied, or a quorum ends the run."""
        self.log("ready", pid=os.getpid())
        trained = False
        while self.synchronize(trained) and not self._ends and self.trained < target:
            self.train_round()
            trained = True
        if self._ends or self.trained >= target:
            self.log("end", loss=self.evaluate(), trained=self.trained, steps=self.optimizer.attempted_steps)
            self.membership.store.set("ended", "")

    def train_round(self) -> None:
        size, rank = len(self.names), self.names.index(self.name)
        for step in range(self.inner_steps):
            number = self.position + step * size + rank
            loss = loss_of(self.model, self._text[:-HELD_OUT], number)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.log("step", round=self.round, batch=number, loss=loss.item())
        self.position += self.inner_steps * size

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss of the weights that all replicas share, with `noloco` their mean, on held-out text."""
        weights = [values.clone() for values in self._method.anchors().values()]
        if self._method.model_state().per_replica:
            for values in weights:
                self.collectives.sum_over_replicas(values)
                values.div_(self.collectives.replicas)
        self.optimizer.replace_weights(weights)
        return held_out_loss(self.model, self._text)

    # ------------------------------------------------------------------------------------------- exchange

    @torch.no_grad()
    def synchronize(self, trained: bool) -> bool:
        """Exchange the displacement if this replica has `trained`, and admit the replicas that wait.

        A quorum with trained replicas is for their exchange, and one without them for the group of the next round.

        Returns:
            Whether the run goes on.
        """
        self.log("arrives", round=self.round, trained=trained)
        while (quorum := self.membership.agree(Arrival(self.name, self.round, trained))) is not None:
            if quorum.number != self._quorum + 1:
                self._leave()  # the others went on without this replica
            self._quorum = quorum.number
            newest = max(each.round for each in quorum.members)
            if newest < 0:
                raise RuntimeError("no replica that is left has the state; start the run from a checkpoint")
            trainers = [each for each in quorum.members if each.trained and each.round == newest]
            if self.name not in [each.name for each in trainers or quorum.members]:
                continue  # wait for the exchange of the others
            if trainers and self._attempt(quorum.number, trainers, self._exchange):
                self.round, self.trained = self.round + 1, self.trained + self.inner_steps * len(trainers)
                trained, self._ends = False, quorum.ends
                self.log("exchanged", round=self.round, names=self.names, trained=self.trained)
                if len(trainers) == len(quorum.members):
                    return True
            elif not trainers and self._attempt(quorum.number, quorum.members, self._transfer):
                self.log("formed", round=self.round, names=self.names)
                return True
        return False

    def _attempt(
        self, number: int, participants: Sequence[Arrival], action: Callable[[Sequence[Arrival]], None]
    ) -> bool:
        """Run a collective action with the participants; return whether all of them were able to."""
        # A group's first rank has the state.
        participants = sorted(participants, key=lambda each: (-each.round, each.name))
        names, before = [each.name for each in participants], self._exchanged_tensors(copy=True)
        position = self.round, self.position, self.trained
        error = ""
        try:
            if set(names) != set(self.names):
                self._regroup(number, names)
            action(participants)
            self._die("vote")
        except RuntimeError as raised:  # gloo: a connection was closed, or the timeout has passed
            error = str(raised)[:200] or type(raised).__name__
        if self.membership.vote(number, not error, names):
            return True
        self.log("fails", quorum=number, error=error or "another participant was not ready")
        self._leave()  # closes the connections, so that no other replica waits for this one
        torch._foreach_copy_(self._exchanged_tensors(), before)
        self.round, self.position, self.trained = position
        return False

    def _exchange(self, _: Sequence[Arrival]) -> None:
        info = StepInfo((self.round + 1) * NEVER, torch.ones((), dtype=torch.bool))
        self._method.exchange(info)

    def _transfer(self, participants: Sequence[Arrival]) -> None:
        """Send the first participant's state to those that lack the last exchange."""
        begin, ahead = time.monotonic(), participants[0].round
        behind = [rank for rank, each in enumerate(participants) if each.round < ahead]
        tensors = [*self._exchanged_tensors(), *self._moments()]
        counters = torch.tensor([self.round, self.position, self.trained, self.optimizer.attempted_steps])
        message = torch.cat([values.flatten() for values in tensors])
        own = self.names.index(self.name)
        for rank in behind if own in (0, *behind) else ():
            if own == 0:
                dist.send(counters, rank)
                dist.send(message, rank)
            elif own == rank:
                dist.recv(counters, 0)
                dist.recv(message, 0)
        if own in behind:
            parts = message.split([values.numel() for values in tensors])
            torch._foreach_copy_(tensors, [p.view_as(t) for p, t in zip(parts, tensors, strict=True)])
            self.round, self.position, self.trained, self.optimizer.attempted_steps = counters.tolist()
            received = counters.nbytes + message.nbytes
            self.log("receives", bytes=received, seconds=time.monotonic() - begin)

    def _exchanged_tensors(self, copy: bool = False) -> list[Tensor]:
        """Return the weights and the method's states, or copies of them."""
        states = self._method.declared_states()
        tensors = [p.detach() for p in self.model.parameters()]
        tensors += [values for state in states for values in state.tensors.values()]
        return [values.clone() for values in tensors] if copy else tensors

    def _moments(self) -> list[Tensor]:
        return [values for p in self.model.parameters() for values in self.adamw.state[p].values()]

    # -------------------------------------------------------------------------------------------- groups

    def _regroup(self, number: int, names: list[str]) -> None:
        """Form a process group of these replicas, and an optimizer for their number with the same state.

        `replicate` sends the weights of the first rank to the others. It receives the anchors here, so that a replica
        that was started again has them as well.
        """
        begin = time.monotonic()
        self._leave()
        if len(names) > 1:
            store = dist.PrefixStore(f"group/{number}", self.membership.store)
            rank = names.index(self.name)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=len(names), timeout=TIMEOUT)
        connected, cpu = time.monotonic(), time.process_time()
        kept, steps = self._exchanged_tensors(copy=True), self.optimizer.attempted_steps
        self.optimizer.replace_weights(list(self._method.anchors().values()))
        self.optimizer = self._build(dist.group.WORLD if len(names) > 1 else None)
        torch._foreach_copy_(self._exchanged_tensors(), kept)
        self.optimizer.attempted_steps, self.names = steps, names
        seconds = {"group": connected - begin, "optimizer": time.monotonic() - connected}
        self.log("regroups", names=names, seconds=seconds, optimizer_cpu=time.process_time() - cpu)

    @property
    def _method(self) -> LocalMethod:
        method = self.optimizer.methods[0]
        assert isinstance(method, LocalMethod)
        return method

    def _build(self, group: dist.ProcessGroup | None) -> ReplicaOptimizer:
        self.collectives = LiveCollectives(group)
        self.collectives.started = lambda: self._die("exchange")
        made = replicate(
            self.model, self.adamw, self.options, self.collectives, max_norm=MAX_NORM, consistency_interval=0
        )
        made.first_step_check.remove()  # searches all objects of the process for DDP, after every regrouping
        return made

    def _leave(self) -> None:
        self.names = []
        self.collectives.groups = ReplicaGroups(None, None)  # the last reference, so that the connections are closed
        if dist.is_initialized():
            dist.destroy_process_group()

    # -------------------------------------------------------------------------------------- events, faults

    def log(self, event: str, **values: Any) -> None:
        print(json.dumps({"event": event, "name": self.name, "time": time.monotonic()} | values), flush=True)

    def _die(self, point: str) -> None:
        """Kill this process if the store says that it dies at this point."""
        key = f"dies/{self.name}"
        if self.membership.store.check([key]) and self.membership.store.get(key).decode() == point:
            self.log("dies", at=point)
            os.kill(os.getpid(), signal.SIGKILL)


def new_model() -> GPT:
    """Return the GPT of the example with two more layers, 237,184 parameters, and the same weights in every process."""
    torch.manual_seed(0)
    model = GPT(256)
    model.blocks.extend(GPTLayer() for _ in range(2))
    return model


def loss_of(model: GPT, text: Tensor, number: int) -> Tensor:
    x, y = batch(text, number)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def held_out_loss(model: GPT, text: Tensor) -> float:
    return sum(loss_of(model, text[-HELD_OUT:], number).item() for number in range(EVALUATED)) / EVALUATED


def read_text(size: int = 2_000_000) -> Tensor:
    """Return bytes of Python's standard library."""
    files = sorted(Path(argparse.__file__).parent.glob("[a-z]*.py"))
    content = b"".join(path.read_bytes() for path in files)[:size]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("ports", type=int, nargs=2)
    parser.add_argument("--joins", action="store_true", help="receive the state from another replica")
    parser.add_argument("--method", default="diloco", choices=METHODS)
    parser.add_argument("--inner_steps", type=int, default=20)
    parser.add_argument("--batches", type=int, default=1000, help="batches of all replicas, lost ones not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=60.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    membership = Membership(args.name, tuple(args.ports), args.patience)
    Replica(args.name, membership, read_text(), args).run(args.batches)


if __name__ == "__main__":
    main()

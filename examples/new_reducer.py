"""An algorithm of your own: a reducer in one class, held to the laws, and training with it. About a minute on a laptop.

    python examples/new_reducer.py

The algorithm, "star": every rank sends its entries to rank 0, which adds them, keeps the k largest sums, and sends
these back. Rank 0 keeps the sums that it cut.
"""

from dataclasses import dataclass

import torch

import gradsieve
from gradsieve import Comm, Recipe, Reduced, SparseVector
from gradsieve.reducers.cost import Cost
from gradsieve.reducers.protocol import NoState, StatelessReducer
from gradsieve.selectors.exact import Exact
from gradsieve.testing import check_reducer, run_ranks
from gradsieve.vector import add
from gradsieve.wire import Channel

RANKS, STEPS, DENSITY, LR = 4, 200, 0.05, 0.05


@dataclass(frozen=True)
class Star(StatelessReducer):
    """Everything through rank 0."""

    def reduce(self, local: SparseVector, k: int, state: NoState, comm: Comm) -> tuple[Reduced, NoState]:
        channel = Channel(comm, local, k, self.codec)
        nothing = SparseVector.empty(local.numel, local.values)
        others = range(1, comm.size)
        if comm.rank == 0:
            sums = add([local, *(channel.receive(rank) for rank in others)])
            total, cut = sums.top(k)
        else:
            channel.send(local, 0)
            total, cut = nothing, nothing
        total = channel.pass_down(total, None if comm.rank == 0 else 0, tuple(others) if comm.rank == 0 else ())
        # channel.leftover() is what the value code has rounded off; nothing with the exact code.
        return Reduced(total, add([cut, channel.leftover()])), state

    def cost(self, size: int, k: int, numel: int) -> Cost:
        words = min(2 * k, numel) * max(1, size - 1)  # rank 0 receives most
        return Cost(max(1, size - 1), words, words)


def train(comm: Comm) -> list[float]:
    """Linear regression; each rank has samples of its own."""
    truth = torch.randn(1000, generator=torch.Generator().manual_seed(99))  # ranks are threads: no global seed
    generator = torch.Generator().manual_seed(comm.rank)
    weight, state, losses = torch.zeros(1000), None, []
    for _ in range(STEPS):
        inputs = torch.randn(64, 1000, generator=generator)
        error = inputs @ (weight - truth)
        losses.append(float(error.square().mean()))
        grad = inputs.T @ error / 64
        mean, state = gradsieve.sparse_allreduce(grad, Recipe(Exact(), Star()), density=DENSITY, comm=comm, state=state)
        weight -= LR * mean
    return losses


def main() -> None:
    check_reducer(Star)
    print("Star keeps the laws: 1 to 8 ranks, every pattern.")
    losses = run_ranks(RANKS, train)[0]
    print(f"Trained with it on {RANKS} ranks: loss {losses[0]:.0f} -> {losses[-1]:.2g} after {STEPS} steps.")


if __name__ == "__main__":
    main()

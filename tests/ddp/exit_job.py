"""One rank of a small job that trains and ends, in the way it is told: for `test_exit`.

destroy: as torch's examples end. close: sieve and group are closed. nothing: the interpreter just ends.
lost: the last rank is killed, and the others end by the error they get. lost-gradients and lost-updates: the same while
recipe "auto" exchanges densely.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from support.ddp_models import attached, loss_of, train
from support.decisions import DENSE_WINS, scripted
from support.updates_models import started

DENSE = {
    "lost-gradients": lambda: attached("auto", 0.05),
    "lost-updates": lambda: started("auto", 0.5, check_replicas_every=0),
}
DENSE_STEPS = 40  # the trial is over


def main(ending: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    if ending in DENSE:
        model, sieve, optimizer = DENSE[ending]()
        scripted(sieve, DENSE_WINS)
    else:
        model, sieve, optimizer = attached(ddp={"bucket_cap_mb": 0.01}, check_replicas_every=2)
    train(model, range(DENSE_STEPS if ending in DENSE else 4), rank, optimizer)
    if ending.startswith("lost"):
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss_of(model, rank, 4).backward()
    elif ending == "close":
        sieve.close()
        dist.destroy_process_group()
    elif ending == "destroy":
        dist.destroy_process_group()
    print(f"rank {rank} is done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""SGD for ranks that step on their own gradients and exchange their updates. There is nothing to correct.

With learning rate lr, momentum b, dampening d and weight decay c, a rank's step is

    buffer = b buffer + (1 - d) (gradient + c parameter),    parameter = parameter - lr buffer.

Both lines are linear in gradient, parameter and buffer, and so is Nesterov's form. The mean over ranks of these steps
is therefore the step of the mean gradient at the mean of all local models: what dense training does.
"""

from __future__ import annotations

import torch

from gradsieve.updates.own import OwnGradients


class SGD(OwnGradients, torch.optim.SGD):
    """`torch.optim.SGD` for a model whose updates a sieve exchanges.

    Same arguments, same state. Its step is torch's, bit for bit, with a sieve and without: SGD is linear in the
    gradient, so the mean of the ranks' steps is the step of the mean gradient. The class exists so that a script can
    name any of its optimizers from `gradsieve`, and so that `Sieve.adapt` knows it.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> optimizer = gradsieve.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> sieve = gradsieve.attach(model, optimizer=optimizer)
    """

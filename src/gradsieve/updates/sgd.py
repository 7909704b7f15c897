"""SGD for ranks that step on their own gradients and exchange their updates. There is nothing to correct.

With learning rate lr, momentum b, dampening d and weight decay c, a rank's step is

    buffer = b buffer + (1 - d) (gradient + c parameter),    parameter = parameter - lr buffer.

Both lines are linear in gradient, parameter and buffer, and so is Nesterov's form. So the mean of these steps over all
ranks is the step of the mean gradient at the mean of all local models, as in dense training.
"""

from __future__ import annotations

import torch

from gradsieve.updates.own import OwnGradients


class SGD(OwnGradients, torch.optim.SGD):
    """`torch.optim.SGD` for a model whose updates are exchanged.

    Its step is torch's, bit for bit, with a sieve and without. SGD is linear in the gradient, so the mean of the ranks'
    steps is the step of the mean gradient. The class exists so that a script can take all optimizers from `gradsieve`,
    and so that `Sieve.adapt` knows it.

    Args:
        params: Parameters or parameter groups.
        lr: The learning rate.
        momentum: The momentum factor.
        dampening: Dampening of the momentum.
        weight_decay: This multiple of the parameters is added to the gradient.
        nesterov: Whether to use Nesterov momentum.
        maximize, foreach, differentiable, fused: As for `torch.optim.SGD`.

    Example:
        >>> import gradsieve
        >>> optimizer = gradsieve.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> sieve = gradsieve.attach(model, optimizer=optimizer)
    """

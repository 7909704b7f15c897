"""The parameters whose gradients are exchanged: those of the optimizer, by their names in the model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsieve.errors import InputError

Named = nn.Module | Iterable[tuple[str, Tensor]]

BOTH = (
    "DistributedDataParallel averages gradients densely by itself, and the optimizer would do so again: give it the "
    "plain model, or keep DDP and use gradsieve.attach(model, ...) with a plain optimizer"
)


def named_parameters(model: Named) -> dict[str, Tensor]:
    """Return the parameters that require gradients, in order. A DDP model is refused, also by its names."""
    if isinstance(model, DistributedDataParallel):
        raise InputError(f"the model is wrapped already: {BOTH}")
    try:
        pairs = list(model.named_parameters() if isinstance(model, nn.Module) else model)
        found = {str(name): tensor for name, tensor in pairs if tensor.requires_grad and tensor.numel()}
    except (TypeError, ValueError, AttributeError):
        raise InputError("parameters must be a model, or pairs as model.named_parameters() returns them") from None
    if len(found) < len({id(tensor) for _, tensor in pairs if tensor.requires_grad and tensor.numel()}):
        raise InputError("every parameter needs a name of its own, and some names occur twice")
    if found and all(name.startswith("module.") for name in found):
        raise InputError(f"all names begin with 'module.', as in a wrapped model: {BOTH}")
    for name, tensor in found.items():
        if hasattr(tensor, "placements"):
            raise InputError(f"parameter {name} is sharded (a DTensor): only whole replicas can be exchanged here")
    if not found:
        raise InputError("there are no parameters that require gradients: there is nothing to exchange")
    return found


def parameters_of(optimizer: Optimizer, model: Named) -> dict[str, Tensor]:
    """Return an optimizer's parameters by name; each must have one."""
    owned = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    named = {name: tensor for name, tensor in named_parameters(model).items() if id(tensor) in owned}
    trained = [tensor for group in optimizer.param_groups for tensor in group["params"] if tensor.requires_grad]
    nameless = [tensor for tensor in trained if tensor.numel() and not any(tensor is other for other in named.values())]
    if nameless:
        raise InputError(
            f"{len(nameless)} of the optimizer's parameters have no name (the first is of shape "
            f"{tuple(nameless[0].shape)}): give the model whose parameters it has, or all of its named_parameters()"
        )
    return named

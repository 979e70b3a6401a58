"""SGD whose scaling factors learn by an accelerated proximal step (Huang and Wang 2018)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ProximalSGD(torch.optim.SGD):
    """SGD, but for parameters of groups with a `shrinkage` c: these are driven to zero by it.

    With learning rate n, momentum m and gradient of the loss alone:

        z = s - n * gradient, then z = sign(z) * max(|z| - n * c, 0)
        v = z - s + m * v
        s = max(0, z + m * v)
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step; all other parameters learn by SGD as usual."""
        shrunk = [g for g in self.param_groups if g.get("shrinkage") is not None]
        gradients = [(g, p, p.grad) for g in shrunk for p in g["params"]]
        for _, parameter, _ in gradients:
            parameter.grad = None  # so that SGD passes them over
        loss = super().step(closure)
        for group, parameter, gradient in gradients:
            if gradient is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            proximal_step(
                parameter,
                gradient,
                state["momentum_buffer"],
                group["lr"],
                group["shrinkage"],
                group["momentum"],
            )
            parameter.grad = gradient
        return loss


def proximal_step(
    factors: Tensor,
    gradient: Tensor,
    velocity: Tensor,
    rate: float | Tensor,
    shrinkage: float,
    momentum: float,
) -> None:
    """Changes factors and velocity in place, as `ProximalSGD` says."""
    z = factors - rate * gradient
    z = z.sign() * (z.abs() - rate * shrinkage).clamp_min(0)
    velocity.copy_(z - factors + momentum * velocity)
    factors.copy_((z + momentum * velocity).clamp_min(0))

"""Networks to hand over: plain modules that hold the channels they run, and no more.

They need nothing of deepmoe, and export to ONNX or by `torch.export` with the savings in them.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepmoe.errors import UserError
from deepmoe.graph import scale_inputs
from deepmoe.graph.capture import one_tensor
from deepmoe.hard_moe import HardMoE
from deepmoe.model import (
    DeepMoE,
    WithExits,
    check_gated,
    confidence,
    joint_answer,
    refuse_sparse,
)
from deepmoe.ops import at_least_single


class Logits(nn.Module):
    """A network whose output is one tensor, whatever its own class calls it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return one_tensor(self.network(x_BCHW))


class CodedNetwork(nn.Module):
    """A small network for each code, and what finds an image's code. For one image at a time.

    It knows no exits: `ExitingNetwork` does.

    Args:
        model: with a codebook.
    """

    def __init__(self, model: DeepMoE) -> None:
        super().__init__()
        self.routes = Routes(model, "CodedNetwork")
        assert model.embedding is not None  # where there are heads
        self.embedding = copy.deepcopy(model.embedding)
        _only_to_run(self)

    def forward(self, x_1CHW: Tensor) -> Tensor:
        _check_one_image(x_1CHW)
        e_1D, _ = self.embedding(x_1CHW)
        return self.routes(x_1CHW, e_1D)


class ExitingNetwork(WithExits):
    """The embedding, and the rest for images that it is not sure of. For one image at a time.

    The rest is the base network where the model has no gates, and else a small network for each
    code of its codebook.

    Args:
        model: with exits, and without gates or with a codebook.
    """

    exit_at: Tensor

    def __init__(self, model: DeepMoE) -> None:
        super().__init__()
        if not isinstance(model, DeepMoE) or model.exit_at is None or model.embedding is None:
            raise UserError("ExitingNetwork takes a model with exits: deepmoe exits makes one")
        refuse_sparse(model, "ExitingNetwork")
        self.gated = model.gated
        self.rest: nn.Module
        if self.gated:
            self.rest = Routes(model, "ExitingNetwork")
        else:
            self.rest = Logits(copy.deepcopy(model.network))
        self.embedding = copy.deepcopy(model.embedding)
        vote = None if model.exit_vote is None else model.exit_vote.clone()
        self._set_exits(model.exit_at.clone(), vote)
        _only_to_run(self)

    def forward(self, x_1CHW: Tensor) -> Tensor:
        _check_one_image(x_1CHW)
        e_1D, logits = self.embedding(x_1CHW)
        return torch.cond(
            (confidence(logits) >= self.exit_at)[0],
            lambda x, e, logits: logits.clone(),  # a branch must not give back what it was given
            self._go_on,
            (x_1CHW, e_1D, logits),
        )

    def _go_on(self, x_1CHW: Tensor, e_1D: Tensor, embedding_logits: Tensor) -> Tensor:
        logits = self.rest(x_1CHW, e_1D) if self.gated else self.rest(x_1CHW)
        return joint_answer(logits, embedding_logits, self.exit_vote)


class Routes(nn.Module):
    """A small network for each code of a model, to be run behind its embedding."""

    def __init__(self, model: DeepMoE, taker: str) -> None:
        super().__init__()
        check_gated(model, taker)
        model.check_ahead()
        if model.codebook is None or model.heads is None:
            raise UserError("the model has no codebook: train it with train.codes")
        if model.thresholds is not None:
            raise UserError("the model has thresholds of an earlier version: run deepmoe cut again")
        self.heads = copy.deepcopy(model.heads)
        self.codebook = copy.deepcopy(model.codebook)
        self.networks = nn.ModuleList(
            static_network(model, code) for code in model.codebook.codes.unbind()
        )

    def forward(self, x_1CHW: Tensor, e_1D: Tensor) -> Tensor:
        if len(self.networks) == 1:  # exporters refuse a search whose answer nobody uses
            return self.networks[0](x_1CHW)
        code = self.codebook.nearest(self.heads(e_1D))[0]
        return _run_one_of(list(self.networks), code, 0, x_1CHW)


class ExpertNetworks(nn.Module):
    """Experts, and what finds the one that an image runs. For one image at a time.

    Args:
        model: of experts.
    """

    centroids: Tensor

    def __init__(self, model: HardMoE) -> None:
        super().__init__()
        if not isinstance(model, HardMoE):
            raise UserError("ExpertNetworks takes a model of experts: train it with model.experts")
        refuse_sparse(model, "ExpertNetworks")
        self.features = copy.deepcopy(model.embedding)
        self.networks = nn.ModuleList(Logits(copy.deepcopy(expert)) for expert in model.network)
        self.register_buffer("centroids", model.centroids.clone())
        _only_to_run(self)

    def forward(self, x_1CHW: Tensor) -> Tensor:
        _check_one_image(x_1CHW)
        # As `nearest` does it, which ONNX has no operation for.
        apart_KD = at_least_single(self.features(x_1CHW)) - self.centroids
        number = apart_KD.square().sum(dim=1).argmin()
        return _run_one_of(list(self.networks), number, 0, x_1CHW)


@torch.no_grad()
def static_network(model: DeepMoE, gates_C: Tensor) -> nn.Module:
    """A plain network that gives what the model's base network gives under these gates.

    Exits are left behind: it has no embedding that could answer.

    Args:
        model: gated.
        gates_C: of all groups side by side, such as a code of its codebook, or
            `torch.cat(output.gates, dim=1)[0]` of an image.

    Returns:
        A network of its own, in evaluation mode, without the channels whose gates are closed, and
        with the other gates in its weights.
    """
    check_gated(model, "static_network")
    width = sum(model.gating.widths)
    if not isinstance(gates_C, Tensor) or gates_C.shape != (width,):
        kind = list(gates_C.shape) if isinstance(gates_C, Tensor) else type(gates_C).__name__
        raise UserError(f"a route is {width} gates side by side, not {kind}")
    if not bool(gates_C.isfinite().all()):
        raise UserError("a route has gates that are not finite")
    gates = gates_C.detach().split(model.gating.widths)
    small, gating, left = model.gating.narrow(model.network, [g != 0 for g in gates])
    kept = [g.index_select(0, at.to(g.device)) for g, at in zip(gates, left, strict=True)]
    scale_inputs(small, gating, torch.cat(kept))
    return Logits(small).eval()


def _run_one_of(networks: Sequence[nn.Module], number: Tensor, first: int, x: Tensor) -> Tensor:
    """Runs the network of a number; the first of these has the number `first`.

    By halves: exporters go through a branch again for each one that it lies in.
    """
    if len(networks) == 1:
        return networks[0](x)
    half = len(networks) // 2
    return torch.cond(
        number < first + half,
        lambda x: _run_one_of(networks[:half], number, first, x),
        lambda x: _run_one_of(networks[half:], number, first + half, x),
        (x,),
    )


def _only_to_run(network: nn.Module) -> None:
    """Evaluation mode, and no gradients: for these, PyTorch would trace both branches every time.

    Who loads an exported file may not think of `torch.no_grad()`, and would wait for seconds.
    """
    network.eval().requires_grad_(False)


def _check_one_image(x_BCHW: Tensor) -> None:
    if x_BCHW.shape[0] != 1:
        raise UserError(f"this network takes one image at a time, not {x_BCHW.shape[0]}")

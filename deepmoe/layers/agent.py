"""Runtime Neural Pruning (Lin et al. 2017): an agent decides how much of each layer runs.

Channels of a layer are parted into groups, the most important ones first; action i runs the first
i + 1 of them. The agent reads what the layer reads, remembers what it has seen by one recurrent
cell for all layers, and values each action by the reward to be had from there on: a price for every
group beyond the first, and the task's loss at the end.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepmoe.errors import UserError
from deepmoe.layers.feature_heads import Decisions, FeatureHeads, Pass, pooled
from deepmoe.layers.heads import project, without_autocast


class PruningAgent(FeatureHeads):
    """The agent: an encoder and a decoder of each layer's own, and one recurrent cell.

    In training it explores: with probability `epsilon`, an action is any of them. In evaluation
    it takes the best one. Its gates are 0 or 1.

    Args:
        inputs: channels that the first maker of each gated group reads.
        widths: gates of each gated group of channels.
        groups: actions in each layer.
        hidden: width of the recurrent cell.
        penalty: reward of every group that an action runs beyond the first; negative.
    """

    kind = "rnp"
    penalty: Tensor
    shift: Tensor
    epsilon: Tensor
    ranks_C: Tensor

    def __init__(
        self,
        inputs: Sequence[int],
        widths: Sequence[int],
        *,
        groups: int = 4,
        hidden: int = 32,
        penalty: float = -0.1,
    ) -> None:
        super().__init__(inputs, widths)
        if penalty >= 0:
            raise UserError(f"the penalty of a group of channels is below 0, not {penalty}")
        self.groups = groups
        self.hidden = hidden
        self.first_penalty = penalty
        self.encoders = nn.ModuleList(nn.Linear(read, hidden) for read in inputs)
        self.cell = nn.GRUCell(hidden, hidden)
        self.decoders = nn.ModuleList(nn.Linear(hidden, groups) for _ in widths)
        for decoder in self.decoders:
            assert isinstance(decoder, nn.Linear)
            nn.init.zeros_(decoder.weight)  # no action is better than another, as far as is known
            nn.init.zeros_(decoder.bias)
        # Tensors, so that they are saved, and that what is compiled or captured follows them.
        self.register_buffer("penalty", torch.tensor(float(penalty)))
        self.register_buffer("shift", torch.zeros(()))  # price that decisions know, and values not
        self.register_buffer("epsilon", torch.ones(()))
        self.register_buffer("ranks_C", torch.cat([torch.arange(width) for width in self.widths]))

    def start(self) -> "AgentPass":
        return AgentPass(self)

    @torch.no_grad()
    def order_by_strength(self, strengths: Sequence[Tensor]) -> None:
        """Parts each layer's channels anew: the strongest are of the first group."""
        ranks = [s.argsort(descending=True, stable=True).argsort() for s in strengths]
        self.ranks_C.copy_(torch.cat(ranks))

    def values(self, number: int, s_BC: Tensor, memory_BH: Tensor) -> tuple[Tensor, Tensor]:
        """Q-values of a layer's actions, and what the agent remembers then."""
        encoder, decoder = self.encoders[number], self.decoders[number]
        with without_autocast(s_BC.device):
            e_BH = project(s_BC, encoder.weight) + encoder.bias  # type: ignore[arg-type, operator]
            memory_BH = self.cell(e_BH, memory_BH)
            return decoder(memory_BH), memory_BH

    def best(self, values_BA: Tensor) -> Tensor:
        """The best actions; of equal ones, that which runs most."""
        actions_A = torch.arange(self.groups, device=values_BA.device)
        priced_BA = values_BA - self.shift * actions_A
        return self.groups - 1 - priced_BA.flip(1).argmax(dim=1)

    def explored(self, actions_B: Tensor) -> Tensor:
        """The actions, some of them replaced by random ones."""
        anywhere_B = torch.rand(actions_B.shape, device=actions_B.device) < self.epsilon
        others_B = torch.randint_like(actions_B, self.groups)
        return torch.where(anywhere_B, others_B, actions_B)

    def gates_of(self, number: int, actions_B: Tensor) -> Tensor:
        """Ones at the channels that actions run."""
        width = self.widths[number]
        ranks_C = self.ranks_C.split(self.widths)[number]
        running_B = (width * (actions_B + 1) + self.groups - 1) // self.groups
        return (ranks_C < running_B[:, None]).to(self.penalty.dtype)

    @property
    def macs(self) -> int:
        recurrent = 2 * 3 * self.hidden**2
        return sum(self.hidden * (read + self.groups) + recurrent for read in self.inputs)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "groups": self.groups,
            "hidden": self.hidden,
            "penalty": self.first_penalty,
        }


class AgentPass(Pass):
    """A pass under `PruningAgent`: what it has seen so far, and what it has decided."""

    def __init__(self, heads: PruningAgent) -> None:
        self.heads = heads
        self.memory_BH: Tensor | None = None
        self.values: list[Tensor] = []
        self.actions: list[Tensor] = []

    def gates(self, number: int, x: Tensor, dim: int) -> Tensor:
        heads = self.heads
        s_BC = pooled(x.detach(), dim).to(heads.penalty.dtype)  # it looks, and changes nothing
        memory_BH = self.memory_BH
        if memory_BH is None:
            memory_BH = s_BC.new_zeros(len(s_BC), heads.hidden)
        values_BA, self.memory_BH = heads.values(number, s_BC, memory_BH)
        actions_B = heads.best(values_BA.detach())
        if heads.training:
            actions_B = heads.explored(actions_B)
        self.values.append(values_BA)
        self.actions.append(actions_B)
        return heads.gates_of(number, actions_B)

    @property
    def decisions(self) -> Decisions:
        actions_BL = torch.stack(self.actions, dim=1)
        return Decisions(torch.stack(self.values, dim=1), actions_BL, self.heads.penalty)


def agent_loss(decisions: Decisions, last_reward_B: Tensor, discount: float = 1.0) -> Tensor:
    """The squared error of Q-learning: (r + discount * max Q(s') - Q(s, a))^2, on average.

    Args:
        decisions: of a batch.
        last_reward_B: that of the end, for each image: what the task's loss takes off.
        discount: of what comes later.
    """
    values_BLA, actions_BL, penalty = decisions
    rewards_BL = penalty * actions_BL
    taken_BL = values_BLA.gather(2, actions_BL[:, :, None])[:, :, 0]
    later_BL = discount * values_BLA.detach().amax(dim=2)[:, 1:]
    # Nothing comes after the last layer but what the task's loss takes.
    targets_BL = rewards_BL + torch.cat([later_BL, last_reward_B.detach()[:, None]], dim=1)
    return F.mse_loss(taken_BL, targets_BL)

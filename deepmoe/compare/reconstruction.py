"""A layer's weights refitted, so that it gives from fewer channels what it gave from all."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepmoe.compare.least_squares import corrections
from deepmoe.compare.readers import Reader
from deepmoe.processes import sum_over_processes

LEAST_SCALE = 1e-3  # of a norm's largest: channels scaled by less can't mend a shortcut


@dataclass(eq=False)
class Sums:
    """What the regressions of a layer need of its samples: J inputs and places, O outputs.

    Where a shortcut is added behind a norm, errors are counted there: outputs are times the norm's
    scale, and the target has the difference of the shortcuts.

    Attributes:
        reader: the layer.
        scale_O: of the outputs.
        xx_JJ: X'X.
        xy_JO: X'Y.
        x_J: sum of X.
        y_O: sum of Y.
        count: of rows.
    """

    reader: Reader
    scale_O: Tensor
    xx_JJ: Tensor
    xy_JO: Tensor
    x_J: Tensor
    y_O: Tensor
    count: Tensor

    @classmethod
    def empty(cls, reader: Reader, network: nn.Module) -> "Sums":
        """Before the first sample."""
        outputs, inputs = reader.weight(network).flatten(1).shape
        scale_O = reader.weight(network).new_ones(outputs, dtype=torch.float64)
        shapes = ((inputs, inputs), (inputs, outputs), (inputs,), (outputs,), ())
        zeros = [scale_O.new_zeros(shape) for shape in shapes]
        if reader.shortcut is not None and reader.norm is not None:
            norm = network.get_submodule(reader.norm)
            assert isinstance(norm, nn.BatchNorm2d) and norm.running_var is not None
            scale_O = (norm.running_var.double() + norm.eps).rsqrt()
            scale_O = scale_O if norm.weight is None else scale_O * norm.weight.detach().double()
        return cls(reader, scale_O, *zeros)

    def add(self, x_SCK: Tensor, y_SO: Tensor, difference_SO: Tensor | None) -> None:
        """Takes in samples: inputs, the original's outputs, the original's shortcut less this."""
        x_SJ, y_SO = x_SCK.flatten(1).double(), y_SO.double() * self.scale_O
        if difference_SO is not None:
            y_SO += difference_SO
        self.xx_JJ.addmm_(x_SJ.T, x_SJ)
        self.xy_JO.addmm_(x_SJ.T, y_SO)
        self.x_J += x_SJ.sum(dim=0)
        self.y_O += y_SO.sum(dim=0)
        self.count += len(x_SJ)

    def of_all_processes(self) -> "Sums":
        """The sums of all processes, each of which has other images."""
        parts = (self.xx_JJ, self.xy_JO, self.x_J, self.y_O, self.count)
        return Sums(self.reader, self.scale_O, *map(sum_over_processes, parts))

    def by_unit(self, network: nn.Module, stays: Tensor, units: slice) -> tuple[Tensor, Tensor]:
        """Z'Z and Z'Y for Z_i = X_i W_i, for some units; Y is less what other inputs give.

        Args:
            network: with the weights.
            stays: which of all units are there.
            units: whose Z is meant.
        """
        weight_OJ, unit_J = self._weight(network), self._units(network)
        is_mine = (unit_J >= units.start) & (unit_J < units.stop)
        other = (stays.to(unit_J.device)[unit_J] & ~is_mine).nonzero().flatten()
        mine = is_mine.nonzero().flatten()
        w_OJ, xx_JJ = weight_OJ[:, mine], self.xx_JJ[mine]
        rest_JO = self.xy_JO[mine] - xx_JJ[:, other] @ weight_OJ[:, other].T
        number, width = unit_J[mine] - units.start, units.stop - units.start
        zz = w_OJ.T @ w_OJ * xx_JJ[:, mine]
        zz = zz.new_zeros(width, len(mine)).index_add_(0, number, zz)
        zz = zz.new_zeros(width, width).index_add_(1, number, zz)
        zy = (w_OJ.T * rest_JO).sum(dim=1)
        return zz, zy.new_zeros(width).index_add_(0, number, zy)

    def refit(self, network: nn.Module, original: nn.Module, stays: Tensor) -> None:
        """Gives the layer the weights of least squares; those of channels that go are zero.

        Args:
            network: is changed.
            original: whose outputs are wanted.
            stays: which of all units are left.
        """
        weight_OJ, unit_J = self._weight(network), self._units(network)
        left = stays.to(unit_J.device)[unit_J]
        weight_OJ[:, ~left] = 0
        homes = [_intercept(self.reader, model) for model in (network, original)]
        xx_JJ, xy_JO = self.xx_JJ, self.xy_JO
        if homes[0] is not None:  # an intercept stands for the means
            xx_JJ = xx_JJ - torch.outer(self.x_J, self.x_J) / self.count
            xy_JO = xy_JO - torch.outer(self.x_J, self.y_O) / self.count
        scale = self.xx_JJ.diagonal()[left].mean() if bool(left.any()) else None
        rest_JO = xy_JO[left] - xx_JJ[left] @ weight_OJ.T
        fitted_OJ = weight_OJ.clone()
        fitted_OJ[:, left] += corrections(xx_JJ[left][:, left], rest_JO, scale).T
        intercept_O = (self.y_O - fitted_OJ @ self.x_J) / self.count

        size_O = self.scale_O.abs()
        mends_O = size_O > LEAST_SCALE * size_O.max()
        old_OCK = self.reader.weight(network)
        new_OJ = fitted_OJ[mends_O] / self.scale_O[mends_O, None]
        old_OCK[:, ~left.view(old_OCK.shape[1:])] = 0
        old_OCK[mends_O] = new_OJ.view(-1, *old_OCK.shape[1:]).to(old_OCK)
        if homes[0] is not None and homes[1] is not None:
            (home, sign), (first, _) = homes[0], homes[1]
            moved_O = sign * (intercept_O / self.scale_O).to(home)
            home[mends_O] = (first + moved_O)[mends_O]

    def _weight(self, network: nn.Module) -> Tensor:
        return self.reader.weight(network).flatten(1).double() * self.scale_O[:, None]

    def _units(self, network: nn.Module) -> Tensor:
        """The unit of each input and place; the last of all stands for none."""
        weight = self.reader.weight(network)
        units = self.reader.layer.ins.repeat_interleave(weight.shape[2])
        return units.to(weight.device)


def _intercept(reader: Reader, network: nn.Module) -> tuple[Tensor, int] | None:
    """Where a constant on a layer's outputs can go, and its sign there; `None` for nowhere.

    A bias takes it. So does the mean that a norm right behind takes off: that is measured anew when
    all is done, but layers that come later are fitted to what this one gives now.
    """
    bias = network.get_submodule(reader.path).bias
    if isinstance(bias, Tensor):
        return bias.detach(), 1
    if reader.norm is not None:
        mean = network.get_submodule(reader.norm).running_mean
        assert isinstance(mean, Tensor)
        return mean, -1
    return None

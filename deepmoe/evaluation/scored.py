"""What evaluations of either task share: costs, and how they are told."""

from typing import TYPE_CHECKING, Any, ClassVar

from deepmoe.console import table_text
from deepmoe.costs import format_macs
from deepmoe.figures import bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Scored:
    """What a model does on a set of images; costs are means over images."""

    images: int
    accuracy: float  # the figure that a training run is judged by
    macs: float  # base network as gated, plus embedding and gate heads
    dense_macs: float  # of the base network alone, with all channels
    active: float  # share of the gated channels that run
    evaluated_on: str | None  # the images' name, such as test

    measure: ClassVar[str]

    @property
    def macs_share(self) -> float:
        """Mean MACs over those of the dense base network."""
        return self.macs / self.dense_macs

    def _rows(self) -> list[tuple[str, str]]:
        name = "" if self.evaluated_on is None else f" ({self.evaluated_on})"
        return [
            ("images", f"{self.images:,}{name}"),
            (self.measure, f"{self.accuracy:.2%}"),
            ("mean MACs", f"{format_macs(self.macs)} ({self.macs_share:.1%} of dense)"),
            ("active channels", f"{self.active:.1%}"),
        ]

    def __str__(self) -> str:
        return table_text(("", ""), self._rows())

    def _named(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values, with the images' name where they have one."""
        return {k: v for k, v in values.items() if k != "evaluated_on" or v is not None}

    def plot(self) -> "Figure":
        """What an image costs on average, beside the dense network."""
        costs = {"dense": self.dense_macs / 1e6, "this model": self.macs / 1e6}
        title = f"{self.measure} {self.accuracy:.2%} on {self.images:,} images"
        return bars(costs, "million MACs an image", title)

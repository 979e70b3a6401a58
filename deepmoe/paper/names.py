"""All tables and figures of the paper, by name."""

from deepmoe.errors import UserError
from deepmoe.paper import (
    figure_expressive,
    figure_prune_cifar,
    figure_rnp,
    figure_shuffle,
    figure_width,
    table_cifar,
    table_cityscapes,
    table_imagenet_wide,
    table_memory,
    table_pruned_resnet50,
    table_widening,
)
from deepmoe.paper.page import Page
from deepmoe.schema import suggest

PAGES: dict[str, Page] = {
    module.PAGE.name: module.PAGE
    for module in (
        table_cifar,
        table_imagenet_wide,
        table_pruned_resnet50,
        figure_rnp,
        figure_prune_cifar,
        figure_shuffle,
        figure_width,
        table_widening,
        table_memory,
        table_cityscapes,
        figure_expressive,
    )
}


def page_named(name: str) -> Page:
    """The table or figure of this name.

    Raises:
        UserError: where there is none.
    """
    if name not in PAGES:
        raise UserError(
            f"no table or figure is named {name!r}{suggest(name, PAGES)}; there are "
            f"{', '.join(PAGES)}, and all"
        )
    return PAGES[name]

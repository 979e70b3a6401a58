"""Whether a gated network keeps the rules: tried out on images, and where it does not, named."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from deepmoe.building import add_gates, usual_widths
from deepmoe.config import EmbeddingConfig
from deepmoe.costs import count_macs
from deepmoe.errors import UserError
from deepmoe.graph import Gating, evaluation_mode
from deepmoe.graph.capture import one_tensor
from deepmoe.model import DeepMoE, check_gated
from deepmoe.random_routes import routes_as_codebook, set_routes

DENSITIES = (0.1, 0.5)
ROUTES = 4  # that images may take
TOLERANCE = 1e-4  # of the largest logit, in single precision


Narrow = tuple[nn.Module, Gating, list[Tensor]]  # as `Gating.narrow` gives it


@dataclass(frozen=True)
class Rule:
    """One thing that was tried."""

    name: str
    passed: bool
    found: str  # how large a difference is, or where it starts

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'} {self.name}: {self.found}"


@dataclass(frozen=True)
class Check:
    """What `check` has found."""

    rules: tuple[Rule, ...]

    @property
    def passed(self) -> bool:
        """Whether all rules are kept."""
        return all(rule.passed for rule in self.rules)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        rules = [{"name": r.name, "passed": r.passed, "found": r.found} for r in self.rules]
        return {"passed": self.passed, "rules": rules}

    def __str__(self) -> str:
        return "\n".join(map(str, self.rules))


@torch.no_grad()
def check(model: DeepMoE, images: Tensor, *, seed: int = 0) -> Check:
    """Tries out, on some images, what a gated model promises; in evaluation mode.

    Gates of one give what the network itself gives, bit for bit. Closed gates give what the network
    without these channels gives. MACs are those that PyTorch's own counter finds. The sparse engine
    gives what the model gives.

    Args:
        model: gated, by `gate` or of the zoo.
        images: a batch of at least one.
        seed: of the gates that are tried.

    Returns:
        What was found; where a rule is broken, the first layer that breaks it.
    """
    _check_arguments(model, images)
    generator = torch.Generator().manual_seed(seed)
    gates = [
        torch.rand(len(images), width, generator=generator).add(0.5).to(images)
        for width in model.gating.widths
    ]
    with evaluation_mode(model):
        rules = [_open_gates(model, images)]
        for density in DENSITIES:
            closed = [_closed(g, density, generator) for g in gates]
            small = model.gating.narrow(model.network, [g[0] != 0 for g in closed])
            rules.append(_closed_gates(model, images, closed, small, density))
            rules.append(_macs(model, images, closed, small, density))
        rules.append(_sparse(model, images, seed))
    return Check(tuple(rules))


def _check_arguments(model: Any, images: Any) -> None:
    check_gated(model, "check")
    model.check_ahead()
    colours, like = model.gating.graph.colours, next(model.parameters())
    fits = isinstance(images, Tensor) and images.dim() == 4 and images.shape[1] == colours
    if not fits or not len(images) or not images.is_floating_point():
        shape = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise UserError(
            f"images come as floats of shape (images, {colours}, height, width), not as {shape}"
        )
    if (images.device, images.dtype) != (like.device, like.dtype):
        raise UserError(
            f"the images are {images.dtype} on {images.device}, "
            f"but the model is {like.dtype} on {like.device}"
        )
    model.gating.graph.positions((images.shape[2], images.shape[3]))  # tells of wrong sizes


def _closed(g_BC: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Gates of which this share is open, at least one, the same for all images."""
    width = g_BC.shape[1]
    order = torch.randperm(width, generator=generator)
    mask = torch.zeros(width)
    mask[order[: max(1, round(density * width))]] = 1
    return g_BC * mask.to(g_BC)


def _open_gates(model: DeepMoE, images: Tensor) -> Rule:
    ones = [torch.ones(len(images), w).to(images) for w in model.gating.widths]
    with _outputs(model, model.network) as original:
        expected = one_tensor(model.network(images))
    with _outputs(model, model.network) as gated:
        found = model.gating(model.network, images, ones)
    name = "gates of one equal the network"
    if torch.equal(found, expected):
        return Rule(name, True, "the same bits")
    return Rule(name, False, _first(original, gated, lambda a, b: not torch.equal(a, b)))


def _closed_gates(
    model: DeepMoE, images: Tensor, gates: list[Tensor], removed: Narrow, density: float
) -> Rule:
    gating, (small, small_gating, left) = model.gating, removed
    kept = [g.index_select(1, at.to(g.device)) for g, at in zip(gates, left, strict=True)]
    with _outputs(model, model.network) as whole:
        expected = gating(model.network, images, gates)
    with _outputs(model, small) as narrow:
        found = small_gating(small, images, kept)
    name = f"closed gates equal removed channels, density {density:g}"
    error = _relative(found, expected)
    if error <= TOLERANCE:
        return Rule(name, True, f"largest error {error:.1e}")
    keep = gating.keep([g[0] != 0 for g in gates])
    compared = {
        layer.path: whole[layer.path][:, ((layer.outs < 0) | keep[layer.outs])]
        for layer in gating.graph.layers
        if layer.is_conv and layer.path in whole
    }
    far = _first(compared, narrow, lambda a, b: a.shape != b.shape or _relative(b, a) > TOLERANCE)
    return Rule(name, False, f"error {error:.1e}, {far}")


def _macs(
    model: DeepMoE, images: Tensor, gates: list[Tensor], removed: Narrow, density: float
) -> Rule:
    name, size = (
        f"MACs equal PyTorch's count, density {density:g}",
        (images.shape[2], images.shape[3]),
    )
    gating, (small, small_gating, left) = model.gating, removed
    kept = [g[:1].index_select(1, at.to(g.device)) for g, at in zip(gates, left, strict=True)]
    expected = int(count_macs(gating, size, [g[:1] for g in gates])[0])
    with FlopCounterMode(display=False) as counter, _counts(small_gating, small, counter) as each:
        small_gating(small, images[:1], kept)
    found = counter.get_total_flops() // 2
    if found == expected:
        return Rule(name, True, f"{found:,}")
    for path, own in small_gating.graph.macs(size).items():
        if each[path] != own:
            return Rule(name, False, f"{path} has {each[path]:,}, not {own:,}")
    return Rule(name, False, f"{found:,}, not {expected:,}: something else multiplies matrices")


@contextmanager
def _counts(
    gating: Gating, network: nn.Module, counter: FlopCounterMode
) -> Iterator[dict[str, int]]:
    """The MACs that a counter finds in each layer, by its path, while the network runs."""
    found: dict[str, int] = {}

    def watch(path: str) -> list[Any]:
        def before(module: nn.Module, inputs: Any) -> None:
            found[path] = -counter.get_total_flops() // 2

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            found[path] += counter.get_total_flops() // 2

        module = network.get_submodule(path)
        return [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after, prepend=True),
        ]

    handles = [handle for layer in gating.graph.layers for handle in watch(layer.path)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _sparse(model: DeepMoE, images: Tensor, seed: int) -> Rule:
    from deepmoe.sparse import SparseModel, sparsify

    name, worst = "the sparse engine equals the model", 0.0
    for density in DENSITIES:
        routed = _with_routes(model, images, density, seed)
        for tried in (routed, routes_as_codebook(routed)):
            output, sparse = tried(images), sparsify(tried)
            assert output.gates is not None and isinstance(sparse, SparseModel)
            for _ in range(2):
                worst = max(worst, _relative(sparse(images).logits, output.logits))
            worst = max(worst, _relative(sparse(images[:1]).logits, output.logits[:1]))
            with torch.inference_mode():
                for logits in (
                    sparse.run_dynamic(sparse.start(images), output.gates),
                    sparse.run_masked(sparse.start(images), torch.cat(output.gates, dim=1)),
                ):
                    worst = max(worst, _relative(logits, output.logits))
    return Rule(name, worst <= TOLERANCE, f"largest error {worst:.1e}")


def _with_routes(model: DeepMoE, images: Tensor, density: float, seed: int) -> DeepMoE:
    """The network under gates of which this share is open, by routes that differ from image to
    image."""
    assert model.embedding is not None
    size = (images.shape[2], images.shape[3])
    widths = model.embedding.widths or usual_widths(model.gating.graph, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        look = EmbeddingConfig(form="latent", dim=ROUTES, widths=widths)
        routed = add_gates(model.network, model.gating, look, None, widths)
    routed.eval()
    set_routes(routed, size, density, seed=seed)
    return routed


@contextmanager
def _outputs(model: DeepMoE, network: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What each layer gives, by its path, while the network runs."""
    found: dict[str, Tensor] = {}

    def keep(path: str) -> Callable[..., None]:
        return lambda module, inputs, output: found.__setitem__(path, output)

    handles = [
        network.get_submodule(layer.path).register_forward_hook(keep(layer.path))
        for layer in model.gating.graph.layers
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _first(
    one: dict[str, Tensor], other: dict[str, Tensor], differs: Callable[[Tensor, Tensor], bool]
) -> str:
    """Where two networks part."""
    for path, expected in one.items():
        if path in other and differs(expected, other[path]):
            return f"{path} is the first layer that differs"
    return "no single layer differs: it is what stands behind them"


def _relative(found: Tensor, expected: Tensor) -> float:
    if not found.numel():
        return 0.0
    difference = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
    return float(difference) if difference.isfinite() else float("inf")

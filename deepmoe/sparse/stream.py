"""A convolution over few positions, bound by its weights: they are read once, where they lie."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.sparse.folding import FoldedLayer
from deepmoe.sparse.threads import Runs, run_on_threads

MOST_POSITIONS = 64  # beyond, a library's convolution is faster in any case
LANES = 64  # blocks of outputs are multiples of it


def stream_pays(layer: FoldedLayer, x_BCHW: Tensor) -> bool:
    """Whether streaming may be worth a trial: one image on a CPU, and few positions."""
    if x_BCHW.device.type != "cpu" or x_BCHW.dtype != torch.float32 or len(x_BCHW) != 1:
        return False
    if layer.groups > 1:
        return False
    same = all(len(set(pair)) == 1 for pair in (layer.stride, layer.padding, layer.dilation))
    height, width = layer.output_size(x_BCHW.shape[-2], x_BCHW.shape[-1])
    return same and 0 < height * width <= MOST_POSITIONS


class StreamedWeights:
    """A layer's weights as rows: for each input channel and tap, its weights to all outputs.

    Rows are cut into blocks of outputs, one or more for each thread.
    """

    def __init__(self, layer: FoldedLayer) -> None:
        outputs, _, *kernel = layer.weight.shape
        self.kernel = (kernel[0], kernel[1])
        share = -(-outputs // torch.get_num_threads())
        self.width = -(-share // LANES) * LANES
        blocks = -(-outputs // self.width)
        self.outputs = outputs
        self.numbers = torch.arange(outputs)
        self.ones = torch.ones(outputs, dtype=torch.float32)
        self.bias = layer.weight.new_zeros(outputs) if layer.bias is None else layer.bias
        padded = F.pad(layer.weight, (0,) * 6 + (0, blocks * self.width - outputs))
        self.rows = padded.reshape(blocks, self.width, -1).transpose(1, 2).contiguous()

    def __call__(
        self,
        layer: FoldedLayer,
        x_BCHW: Tensor,
        onto: Tensor | None,
        outs: Tensor | None,
        ins: Tensor | None,
        gate: Tensor | None,
        run: Runs = run_on_threads,
    ) -> Tensor:
        """The convolution of one image with bias, ReLU (and sum before it) and gate.

        Args:
            layer: all channels.
            x_BCHW: active channels of one image.
            onto: to add, with all outputs.
            outs: numbers of the active outputs; `None` is all.
            ins: numbers of the active inputs; `None` is all.
            gate: of the active outputs.
            run: what runs tasks.
        """
        from deepmoe.sparse import numba_kernels as kernels

        height, width = layer.output_size(x_BCHW.shape[-2], x_BCHW.shape[-1])
        x_HWC = x_BCHW[0].permute(1, 2, 0).contiguous()
        ins = torch.arange(x_BCHW.shape[1]) if ins is None else ins
        positions, chunks = height * width, -(-len(ins) // kernels.CHUNK)
        room = kernels.CHUNK * self.kernel[0] * self.kernel[1] + kernels.GROUP
        values = torch.empty(positions, chunks, room, dtype=torch.float32)
        rows = torch.empty(positions, chunks, room, dtype=torch.int32)
        counts = torch.empty(positions, chunks, dtype=torch.int32)
        geometry = (*self.kernel, layer.stride[0], layer.padding[0], layer.dilation[0], width)
        lists = (values, rows, counts)
        run(
            kernels.list_inputs.ctypes,
            positions,
            [*x_HWC.shape, *geometry, chunks, room, x_HWC, ins, *lists],
        )
        blocks, n_rows, outputs = self.rows.shape
        sizes = (positions, chunks, room, n_rows, outputs)
        sums = torch.empty(blocks, positions, outputs, dtype=torch.float32)
        run(kernels.stream.ctypes, blocks, [*sizes, self.rows, *lists, sums])
        count = self.outputs if outs is None else outs.shape[0]
        y = torch.empty(1, count, height, width, dtype=torch.float32)
        arrays = (
            *(sums, self.numbers if outs is None else outs, self.bias),
            *(self.ones if gate is None else gate, y),
        )
        relu = layer.relu and onto is None
        run(
            kernels.finish.ctypes,
            torch.get_num_threads(),
            [count, positions, outputs, *arrays, int(relu)],
        )
        if onto is not None:
            y = F.relu(y + onto) if layer.relu else y + onto
        return layer.activate_other(y)

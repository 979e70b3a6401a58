"""The gate as training runs it: a multiplication of channels."""

from torch import Tensor


def scale_channels(x_BCHW: Tensor, g_BC: Tensor | None) -> Tensor:
    """Multiplies every channel by its gate; `None` leaves the input as it is.

    The gate takes the input's dtype, so that fp32 gates don't promote bf16 activations.
    """
    if g_BC is None:
        return x_BCHW
    return x_BCHW * g_BC.to(x_BCHW.dtype)[:, :, None, None]

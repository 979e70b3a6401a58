"""The two regressions of `he` and `thinet`, from sums over samples alone.

Both need no more of the samples than X'X and X'Y, so that any number of them can be streamed by.
"""

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from deepmoe.extras import require

RIDGE = 1e-9  # of the mean square: far below what counts, far above what rounding does
ROUNDING = 1e-10  # of the mean square before means were taken off, which leaves its rounding
FIRST_PENALTY = 1e-4  # of the one that leaves nothing
SLACK = 1.1  # how many more than asked for may be left
BISECTIONS = 40
LEAST_VALUE = 1e-12  # of the largest eigenvalue: below it is rounding


def corrections(gram: Tensor, moments: Tensor, scale: Tensor | None = None) -> Tensor:
    """Least squares from X'X and X'R: what to add to weights whose residual is R.

    Where samples don't tell, as for channels that never fire, weights stay as they are.

    Args:
        gram: X'X.
        moments: X'R.
        scale: mean square of X before its means were taken off, if they were.
    """
    ridge = RIDGE * gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny)
    if scale is not None:  # channels that hardly vary leave rounding alone, of either sign
        ridge = ridge + ROUNDING * scale
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.cholesky_solve(moments, torch.linalg.cholesky(gram + ridge * eye))


def lasso(gram: Tensor, moments: Tensor, count: int) -> Tensor:
    """The LASSO's coefficients, with so many of them left, or up to a tenth more.

    Least over b of |Y - Zb|^2 / 2 + penalty |b|_1. The penalty is doubled until fewer are left,
    then bisected.

    Args:
        gram: Z'Z.
        moments: Z'Y.
        count: how many are to be left at least.
    """
    coefficients = _solver(gram.cpu(), moments.cpu())
    high = FIRST_PENALTY * float(moments.abs().max())
    low, left = 0.0, coefficients(high)
    more = left
    while _nonzero(left) >= count and high > 0:
        low, more, high = high, left, 2 * high
        left = coefficients(high)
    for _ in range(BISECTIONS):
        if count <= _nonzero(more) <= SLACK * count:
            break
        middle = (low + high) / 2
        left = coefficients(middle)
        if _nonzero(left) >= count:
            low, more = middle, left
        else:
            high = middle
    return torch.from_numpy(more)


def _nonzero(coefficients: np.ndarray) -> int:
    return int(np.count_nonzero(coefficients))


def _solver(gram: Tensor, moments: Tensor) -> Callable[[float], np.ndarray]:
    """The LASSO's coefficients for a penalty; found by scikit-learn.

    That takes Z and Y, which may have millions of rows. Any others with the same Z'Z and Z'Y have
    the same answer: a root of Z'Z has as many rows as columns.
    """
    require("train", "sklearn")
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import Lasso

    values, vectors = torch.linalg.eigh(gram)
    told = values > LEAST_VALUE * values.max()
    root = values[told].sqrt()
    z = (root[:, None] * vectors[:, told].T).numpy()
    y = (vectors[:, told].T @ moments / root).numpy()

    def coefficients(penalty: float) -> np.ndarray:
        if not len(z):  # no channel ever fires
            return np.zeros(len(gram))
        solver = Lasso(alpha=penalty / len(z), fit_intercept=False, max_iter=5000, tol=1e-5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # near enough: it sets an order
            return solver.fit(z, y).coef_

    return coefficients

"""quantize_rows, the one rule by which weights, activations and cached keys and values become int8, and the
fused multiply-add that integer products are scaled with.

Symmetric, one scale a row. What a row is (an output channel, 64 activations, a key) is up to the caller.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.backends.ops import F32

TINY_ABSMAX = np.float32(127.0) * np.finfo(np.float32).tiny


def fused_multiply_add(x: F32, y: F32, z: F32) -> F32:
    """x · y + z, rounded once (through float64, in which the product of two float32 is exact)."""
    return (x.astype(np.float64) * y + z).astype(np.float32)


def quantize_rows(x: F32) -> tuple[F32, F32]:
    """Symmetric int8 of each row: integers [R, width] (in float32) and scales [R], absmax/127.

    A row whose scale would be subnormal, and so imprecise, counts as zero. A row with a NaN or an infinity
    has integers 0 and scale NaN: what is multiplied with it turns NaN as a whole, and nothing else does.
    """
    is_finite: NDArray[np.bool_] = np.asarray(np.isfinite(x).all(axis=1))  # [R]
    values = np.where(is_finite[:, None], x, np.float32(0.0))
    absmax = np.abs(values).max(axis=1, initial=0.0)  # [R]
    is_used = absmax >= TINY_ABSMAX
    largest = np.where(is_used, absmax, np.float32(1.0))  # no division by zero
    inverse = np.where(is_used, np.float32(127.0) / largest, np.float32(0.0))
    scale = np.where(is_used, largest / np.float32(127.0), np.float32(0.0))
    q = np.rint(values * inverse[:, None])  # half to even
    return q, np.where(is_finite, scale, np.float32(np.nan))

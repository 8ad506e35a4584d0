"""GroupedMatrix: the executable specification of products with GroupedWeights (ops.py), in plain NumPy.

The codes meet the activations as integers; only the sums of a group, which are exact, are scaled. Like every
product of the NumPy backend its order of summation depends on the width alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.backends.numpy_quant import fused_multiply_add, quantize_rows
from octavo.backends.ops import F32, WEIGHT_GROUP, GroupedWeights

CODE_OFFSET = np.float32(128.0)  # of codes with 8 bits


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """Weights as the file holds them; the activations are quantised on the way in, in groups of 32."""

    weight: GroupedWeights

    def __post_init__(self) -> None:
        codes, scale, low = self.weight.codes, self.weight.scale, self.weight.low
        if codes.shape[1] % WEIGHT_GROUP:
            raise ValueError(f"grouped weights {codes.shape}: the second size must be a multiple of 32")
        if not (np.isfinite(scale).all() and (low is None or np.isfinite(low).all())):
            raise ValueError(
                "a scale or lowest value of a weight group is NaN or infinity; the file is damaged"
            )
        if low is not None and codes.max(initial=0) > 15:
            raise ValueError("a code is above 15; codes of weights with a lowest value have 4 bits")

    def multiply(self, x: F32) -> F32:
        """x [T, in] → [T, out]: exact integer sums per group, added up in ascending order of groups."""
        total = np.zeros((x.shape[0], self.weight.codes.shape[0]), np.float32)  # [T, out]
        for g in range(x.shape[1] // WEIGHT_GROUP):
            columns = slice(g * WEIGHT_GROUP, (g + 1) * WEIGHT_GROUP)
            q, a_scale = quantize_rows(x[:, columns])  # [T, 32], [T]
            total = fused_multiply_add(self._group(q, g, columns), a_scale[:, None], total)
        return total

    def _group(self, q: F32, g: int, columns: slice) -> F32:
        """q [T, 32] times the weights of group g → [T, out]."""
        codes = self.weight.codes[:, columns].astype(np.float32)  # [out, 32]
        scale = self.weight.scale[:, g].astype(np.float32)  # [out]
        if self.weight.low is None:
            scaled: F32 = (q @ (codes - CODE_OFFSET).T) * scale
            return scaled
        low = self.weight.low[:, g].astype(np.float32) * q.sum(axis=1, keepdims=True)  # [T, out], exact
        return fused_multiply_add(q @ codes.T, scale, low)

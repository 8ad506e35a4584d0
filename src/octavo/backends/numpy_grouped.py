"""GroupedMatrix: the executable specification of products with GroupedWeights (ops.py), in plain NumPy.

The codes meet the activations as integers; only the sums of a group, which are exact, are scaled. Like every
product of the NumPy backend its order of summation depends on the width alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.backends.numpy_quant import fused_multiply_add, quantize_rows
from octavo.backends.ops import F32, I32, GroupedWeights


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """Weights as the file holds them; the activations are quantised on the way in, in the same groups."""

    weight: GroupedWeights

    def __post_init__(self) -> None:
        w = self.weight
        if w.bits not in ((4, 5) if w.low is not None else (4, 5, 6, 8)):
            raise ValueError(f"there is no kernel for codes of {w.kind}")
        if w.codes.shape[1] % w.group:
            raise ValueError(
                f"grouped weights {w.codes.shape}: the second size must be a multiple of {w.group}"
            )
        if not (np.isfinite(w.scale).all() and (w.low is None or np.isfinite(w.low).all())):
            raise ValueError(
                "a scale or lowest value of a weight group is NaN or infinity; the file is damaged"
            )
        if w.codes.max(initial=0) >> w.bits:
            raise ValueError(f"a code does not fit the {w.bits} bits it should have")

    def multiply(self, x: F32) -> F32:
        """x [T, in] → [T, out]: exact integer sums per group, added up in ascending order of groups."""
        group = self.weight.group
        total = np.zeros((x.shape[0], self.weight.codes.shape[0]), np.float32)  # [T, out]
        for g in range(x.shape[1] // group):
            columns = slice(g * group, (g + 1) * group)
            q, a_scale = quantize_rows(x[:, columns])  # [T, group], [T]
            total = fused_multiply_add(self._group(q, g, columns), a_scale[:, None], total)
        return total

    def rows(self, index: I32) -> F32:
        """The values of these rows → [T, in]; the product with a scale is exact."""
        w = self.weight
        scale = np.repeat(w.scale[index].astype(np.float32), w.group, axis=1)  # [T, in]
        if w.low is None:
            return scale * (w.codes[index].astype(np.float32) - np.float32(1 << (w.bits - 1)))
        return scale * w.codes[index] + np.repeat(w.low[index].astype(np.float32), w.group, axis=1)

    def _group(self, q: F32, g: int, columns: slice) -> F32:
        """q [T, group] times the weights of group g → [T, out]."""
        w = self.weight
        codes = w.codes[:, columns].astype(np.float32)  # [out, group]
        scale = w.scale[:, g].astype(np.float32)  # [out]
        if w.low is None:
            scaled: F32 = (q @ (codes - np.float32(1 << (w.bits - 1))).T) * scale
            return scaled
        low = w.low[:, g].astype(np.float32) * q.sum(axis=1, keepdims=True)  # [T, out], exact
        return fused_multiply_add(q @ codes.T, scale, low)

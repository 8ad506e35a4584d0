"""Rotary frequencies: RopeConfig and a head size → radians per position of each pair of columns.

base[i] = theta ** (-2i / D), i < D/2                          (Su et al., RoFormer, arXiv:2104.09864)
factors base / factors, one by one                             (a table that some checkpoints carry)
linear  base / factor                                          (position interpolation, arXiv:2306.15595)
llama3  base / factor where the wavelength is longer than original/low_freq_factor, base where it is shorter
        than original/high_freq_factor, interpolated between   (Llama 3.1's model code)
yarn    base / factor where a pair turns less than beta_slow times over the original context, base where it
        turns more than beta_fast times, a linear ramp between; cos and sin are scaled by
        0.1 · ln(factor) + 1                                   (Peng et al., YaRN, arXiv:2309.00071)

Computed in float64, rounded once.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.backends.ops import F32
from octavo.errors import UnsupportedModelError
from octavo.models.config import RopeConfig

F64 = NDArray[np.float64]


def rope_frequencies(rope: RopeConfig, head_size: int) -> F32:
    """Radians per position of each rotated pair → [D/2], or fewer where only a share of D is rotated."""
    head_size = int(head_size * rope.rotated_share)
    if head_size % 2:
        raise UnsupportedModelError(f"rotary embedding needs an even head size, the model has {head_size}")
    exponents = np.arange(0, head_size, 2, dtype=np.float64) / head_size  # [D/2]
    base: F64 = rope.theta**-exponents
    if rope.factors:
        if len(rope.factors) != head_size // 2:
            raise UnsupportedModelError(
                f"the model has {len(rope.factors)} rope factors for {head_size // 2} rotary frequencies"
            )
        base = base / np.array(rope.factors)
    return _scaled(base, rope, head_size).astype(np.float32)


def attention_scale(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 for every kind but yarn."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0


def _scaled(base: F64, rope: RopeConfig, head_size: int) -> F64:
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3" and not rope.factors:  # such factors are this very scaling, worked out
        return _llama3(base, rope)
    if rope.kind == "yarn":
        return _yarn(base, rope, head_size)
    return base


def _llama3(base: F64, rope: RopeConfig) -> F64:
    turns = (
        rope.original_max_position * base / (2.0 * math.pi)
    )  # turns of each pair over the original context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 0: all interpolated, 1: all kept
    return (1.0 - kept) * base / rope.factor + kept * base


def _yarn(base: F64, rope: RopeConfig, head_size: int) -> F64:
    def pair_that_turns(times: float) -> float:
        """The (fractional) index of the pair with `times` turns over the original context."""
        wavelengths = rope.original_max_position / (times * 2.0 * math.pi)
        return head_size * math.log(wavelengths) / (2.0 * math.log(rope.theta))

    first = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(rope.beta_slow)), head_size - 1)
    width = last - first if last > first else 0.001  # no division by zero
    interpolated = np.clip((np.arange(head_size // 2) - first) / width, 0.0, 1.0)  # [D/2]
    return interpolated * base / rope.factor + (1.0 - interpolated) * base

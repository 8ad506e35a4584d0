"""The integers inside GGUF's quantised blocks, for kernels that multiply them as they are.

Rows are sequences of blocks of 32 values. Of the types that have a native kernel these are the layouts, d and m
being float16; all others are read as float32 (gguf_file.py) and rounded anew.

    Q4_0  d | 16 bytes               d · (code - 8), code i and code i+16 in the halves of byte i
    Q4_1  d | m | 16 bytes           d · code + m
    Q5_0  d | u32 | 16 bytes         d · (code - 16), the fifth bit of code i is bit i of the u32
    Q8_0  d | 32 signed bytes        d · code
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.models.layers import GroupedWeights

U8 = NDArray[np.uint8]
F16 = NDArray[np.float16]

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q8_0": 34}  # the types with a native kernel
_HALF_MAX = 65504.0


def grouped_weights(raw: U8, type_name: str) -> GroupedWeights | None:
    """Rows of stored bytes [out, row_bytes] of a type in BLOCK_BYTES → the same weights, nothing rounded.

    None in the one case that does not fit the form: a Q4_0 scale whose lowest value, -8·d, overflows float16.
    """
    blocks = raw.reshape(raw.shape[0], -1, BLOCK_BYTES[type_name])  # [out, in/32, bytes]
    scale = _halves(blocks, 0)  # [out, in/32]
    if type_name == "Q8_0":
        return GroupedWeights(_rows(blocks[..., 2:] ^ np.uint8(128)), scale, None)  # signed + 128
    if type_name == "Q5_0":
        bits = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")  # [out, in/32, 32]
        codes = _nibbles(blocks[..., 6:]) | bits << np.uint8(4)
        return GroupedWeights(_rows(codes + np.uint8(128 - 16)), scale, None)
    if type_name == "Q4_1":
        return GroupedWeights(_rows(_nibbles(blocks[..., 4:])), scale, _halves(blocks, 2))
    lowest = scale.astype(np.float32) * np.float32(-8.0)
    if np.abs(lowest).max(initial=0.0) > _HALF_MAX:
        return None
    return GroupedWeights(_rows(_nibbles(blocks[..., 2:])), scale, lowest.astype(np.float16))


def _halves(blocks: U8, start: int) -> F16:
    """The float16 at byte `start` of each block → [out, in/32]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0]


def _nibbles(packed: U8) -> U8:
    """16 bytes a block → 32 codes a block: all lower halves, then all upper halves."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _rows(codes: U8) -> U8:
    """[out, in/32, 32] → [out, in]."""
    return codes.reshape(codes.shape[0], -1)

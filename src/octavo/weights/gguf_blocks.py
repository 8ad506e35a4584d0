"""The integers inside GGUF's quantised blocks, for kernels that multiply them as they are.

Rows are sequences of blocks of 32 or, of the types with a K, 256 values. Of the types that have a native kernel
these are the layouts, d and m being float16; all others are read as float32 (gguf_file.py) and rounded anew.

    Q4_0  d | 16 bytes                  d · (code - 8), code i and code i+16 in the halves of byte i
    Q4_1  d | m | 16 bytes              d · code + m
    Q5_0  d | u32 | 16 bytes            d · (code - 16), the fifth bit of code i is bit i of the u32
    Q5_1  d | m | u32 | 16 bytes        d · code + m
    Q8_0  d | 32 signed bytes           d · code
    Q4_K  d | m | s | 128 bytes         d · s_i · code - m · t_i, i one of 8 groups; s and t in 12 bytes
    Q5_K  d | m | s | 32 | 128 bytes    the same, the fifth bits of group i are the bits i of the 32 bytes
    Q6_K  128 | 64 | s | d              d · s_i · (code - 32), i one of 16 groups, s 16 signed bytes

The scales of the types with a K, products of two numbers, are rounded to float16, by at most 2^-12 of each;
nothing else is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.models.layers import GroupedWeights

U8 = NDArray[np.uint8]
F16 = NDArray[np.float16]
F32 = NDArray[np.float32]

BLOCK_BYTES = {  # the types with a native kernel
    "Q4_0": 18,
    "Q4_1": 20,
    "Q5_0": 22,
    "Q5_1": 24,
    "Q8_0": 34,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
}


def grouped_weights(raw: U8, type_name: str) -> GroupedWeights:
    """Rows of stored bytes [out, row_bytes] of a type in BLOCK_BYTES → the same weights in their groups."""
    blocks = raw.reshape(raw.shape[0], -1, BLOCK_BYTES[type_name])  # [out, blocks, bytes]
    if type_name == "Q6_K":
        return _q6_k(blocks)
    if type_name in ("Q4_K", "Q5_K"):
        return _q4_k(blocks, has_fifth=type_name == "Q5_K")
    scale = _halves(blocks, 0)  # [out, in/32]
    if type_name == "Q8_0":
        return GroupedWeights(_rows(blocks[..., 2:] ^ np.uint8(128)), scale, None, 8)  # signed + 128
    low = _halves(blocks, 2) if type_name.endswith("1") else None
    codes = _nibbles(blocks[..., -16:])
    if not type_name.startswith("Q5"):
        return GroupedWeights(_rows(codes), scale, low, 4)
    fifth = np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little")  # [out, in/32, 32]
    return GroupedWeights(_rows(codes | fifth << np.uint8(4)), scale, low, 5)


def _q4_k(blocks: U8, has_fifth: bool) -> GroupedWeights:
    first, middle, last = (blocks[..., start : start + 4] for start in (4, 8, 12))  # 4 groups each
    above = np.uint8(0b110000)
    steps = np.concatenate(
        [first & np.uint8(63), last & np.uint8(15) | first >> np.uint8(2) & above], axis=-1
    )
    lows = np.concatenate(
        [middle & np.uint8(63), last >> np.uint8(4) | middle >> np.uint8(2) & above], axis=-1
    )
    pairs = blocks[..., -128:].reshape(*blocks.shape[:2], 4, 32)  # two groups in the halves of 32 bytes
    codes = _nibbles(pairs).reshape(*blocks.shape[:2], 8, 32)
    if has_fifth:
        bits = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little")  # [out, blocks, 32, 8]
        codes |= bits.swapaxes(-1, -2) << np.uint8(4)
    scale, low = _products(blocks, 0, steps), _products(blocks, 2, lows)
    return GroupedWeights(_rows(codes), scale, -low, 5 if has_fifth else 4)


def _q6_k(blocks: U8) -> GroupedWeights:
    shape = (*blocks.shape[:2], 2, -1)  # halves of 128 codes
    lower = _nibbles(blocks[..., :128].reshape(shape))  # [out, blocks, 2, 128]
    upper = blocks[..., 128:192].reshape(shape)  # [out, blocks, 2, 32], of each four codes that are 32 apart
    rest = np.concatenate([upper >> np.uint8(shift) & np.uint8(3) for shift in (0, 2, 4, 6)], axis=-1)
    scale = _products(blocks, 208, blocks[..., 192:208].view(np.int8))
    return GroupedWeights(_rows(lower | rest << np.uint8(4)), scale, None, 6)


def _products(blocks: U8, start: int, steps: NDArray[np.integer]) -> F16:
    """The float16 at byte `start` of each block times its `steps` [out, blocks, groups] → [out, groups in all]."""
    exact: F32 = _halves(blocks, start).astype(np.float32)[..., None] * steps
    with np.errstate(over="ignore"):  # an infinity is refused where the weights are packed
        return exact.astype(np.float16).reshape(len(blocks), -1)


def _halves(blocks: U8, start: int) -> F16:
    """The float16 at byte `start` of each block → [out, blocks]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0]


def _nibbles(packed: U8) -> U8:
    """n bytes → 2n codes along the last axis: all lower halves, then all upper halves."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def _rows(codes: U8) -> U8:
    """[out, ...] → [out, in]."""
    return codes.reshape(codes.shape[0], -1)

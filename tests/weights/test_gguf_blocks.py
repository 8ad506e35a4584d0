"""The integers of quantised tensors: the same numbers as dequantising gives, in the same order of rows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo.backends.numpy_grouped import GroupedMatrix
from octavo.backends.ops import GroupedWeights
from octavo.weights.gguf_blocks import BLOCK_BYTES, grouped_weights
from octavo.weights.loader import open_checkpoint

BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # where, if not at 0 alone


def values(weight: GroupedWeights) -> np.ndarray:
    scale = np.repeat(weight.scale.astype(np.float32), weight.group, axis=1)  # [out, in]
    if weight.low is None:
        return scale * (weight.codes.astype(np.float32) - 2 ** (weight.bits - 1))
    return scale * weight.codes + np.repeat(weight.low.astype(np.float32), weight.group, axis=1)


def random_blocks(kind: str, halves: np.ndarray) -> np.ndarray:
    """Random bytes, codes that quantising seldom makes, such as -128, among them; `halves` [5, 3, 1] in blocks."""
    stored = np.random.default_rng(1).integers(0, 256, (5, 3, BLOCK_BYTES[kind])).astype(np.uint8)
    for start in HALVES.get(kind, (0,)):
        stored[..., start : start + 2] = halves.astype(np.float16).view(np.uint8)
    return stored.reshape(5, -1)


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_BYTES if kind[-1] != "K"])
def test_the_integers_stand_for_what_dequantising_gives(kind: str) -> None:
    rows = np.random.default_rng(0).standard_normal((7, 128)).astype(np.float32)
    stored = gguf.quants.quantize(rows, Q[kind])
    weight = grouped_weights(stored, kind)
    assert (weight.codes.shape, weight.scale.shape) == ((7, 128), (7, 4))
    np.testing.assert_array_equal(values(weight), gguf.quants.dequantize(stored, Q[kind]))


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_every_bit_pattern_has_its_place(kind: str) -> None:
    """With powers of two, by which the products of the types with a K are exact as well."""
    stored = random_blocks(kind, 2.0 ** np.arange(-15, 0).reshape(5, 3, 1))
    weight = grouped_weights(stored, kind)
    assert weight.bits == BITS[kind]
    np.testing.assert_array_equal(values(weight), gguf.quants.dequantize(stored, Q[kind]))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_products_of_scales_are_rounded_to_half_precision(kind: str) -> None:
    stored = random_blocks(kind, np.random.default_rng(0).uniform(1e-7, 1.0, (5, 3, 1)))
    weight = grouped_weights(stored, kind)
    exact = gguf.quants.dequantize(stored, Q[kind])
    size = np.repeat(np.abs(weight.scale.astype(np.float32)), weight.group, axis=1) * 2.0**weight.bits
    if weight.low is not None:
        size += np.repeat(np.abs(weight.low.astype(np.float32)), weight.group, axis=1)
    error = np.abs(values(weight) - exact)
    assert error.max() > 0
    assert (error <= size * 2.0**-11).all()


def test_a_scale_beyond_half_precision_is_an_infinity_that_packing_refuses() -> None:
    stored = random_blocks("Q4_K", np.full((5, 3, 1), 60000.0))
    with pytest.raises(ValueError, match="is NaN or infinity"):
        GroupedMatrix(grouped_weights(stored, "Q4_K"))


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0], ids=lambda kind: kind.name)
def test_a_checkpoint_hands_out_every_matrix_in_the_order_of_its_tensor(tiny, tmp_path, kind) -> None:
    config = tiny.config()
    stored = tiny.as_llama_gguf(config, tiny.tensors(config))

    def type_of(name: str) -> Q:
        return kind if stored[name].ndim == 2 else Q.F32

    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tiny.metadata(config), stored, type_of)
    checkpoint = open_checkpoint(path)
    assert checkpoint.has_grouped
    for name in tiny.tensors(config):
        weight = checkpoint.grouped(name)
        assert (weight is None) == name.endswith("norm"), name
        if weight is not None:
            np.testing.assert_array_equal(values(weight), checkpoint.tensor(name), err_msg=name)
    assert checkpoint.grouped("layers.9.q") is None


@pytest.mark.parametrize("kind", [Q.F16, Q.F32, Q.BF16], ids=lambda kind: kind.name)
def test_other_types_are_not_grouped(tiny, tmp_path, kind) -> None:
    config = tiny.config()
    stored = tiny.as_llama_gguf(config, tiny.tensors(config))

    def type_of(name: str) -> Q:
        return kind if stored[name].ndim == 2 else Q.F32

    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tiny.metadata(config), stored, type_of)
    checkpoint = open_checkpoint(path)
    assert not checkpoint.has_grouped
    assert checkpoint.grouped("layers.0.q") is None
    assert checkpoint.tensor("layers.0.q").shape == (32, 32)


def test_a_folder_has_no_integers(tiny, tmp_path) -> None:
    checkpoint = open_checkpoint(
        tiny.write_folder(tmp_path / "m", tiny.hf_json(), tiny.tensors(tiny.config()))
    )
    assert not checkpoint.has_grouped
    assert checkpoint.grouped("layers.0.q") is None

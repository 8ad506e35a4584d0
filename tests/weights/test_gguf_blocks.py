"""The integers of quantised tensors: the same numbers as dequantising gives, in the same order of rows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo.backends.ops import GroupedWeights
from octavo.weights.gguf_blocks import BLOCK_BYTES, grouped_weights
from octavo.weights.loader import open_checkpoint


def values(weight: GroupedWeights) -> np.ndarray:
    scale = np.repeat(weight.scale.astype(np.float32), 32, axis=1)  # [out, in]
    if weight.low is None:
        return scale * (weight.codes.astype(np.float32) - 128)
    return scale * weight.codes + np.repeat(weight.low.astype(np.float32), 32, axis=1)


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_the_integers_stand_for_what_dequantising_gives(kind: str) -> None:
    rows = np.random.default_rng(0).standard_normal((7, 128)).astype(np.float32)
    stored = gguf.quants.quantize(rows, Q[kind])
    weight = grouped_weights(stored, kind)
    assert weight is not None
    assert weight.bits == (4 if kind.startswith("Q4") else 8)
    assert (weight.codes.shape, weight.scale.shape) == ((7, 128), (7, 4))
    np.testing.assert_array_equal(values(weight), gguf.quants.dequantize(stored, Q[kind]))


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_every_bit_pattern_has_its_place(kind: str) -> None:
    """Random bytes are codes that quantising seldom makes, such as -128; scales are kept finite."""
    rng = np.random.default_rng(1)
    stored = rng.integers(0, 256, (5, 3 * BLOCK_BYTES[kind])).astype(np.uint8)
    blocks = stored.reshape(5, 3, -1)
    for start in (0, 2) if kind == "Q4_1" else (0,):
        blocks[..., start : start + 2] = rng.standard_normal((5, 3, 1)).astype(np.float16).view(np.uint8)
    weight = grouped_weights(stored, kind)
    assert weight is not None
    np.testing.assert_array_equal(values(weight), gguf.quants.dequantize(stored, Q[kind]))


def test_a_lowest_value_beyond_half_precision_is_not_grouped() -> None:
    stored = np.zeros((2, 36), np.uint8)
    stored[1, 18:20] = np.array([8188.0], np.float16).view(np.uint8)  # · -8 = -65504
    assert grouped_weights(stored, "Q4_0") is not None
    stored[1, 18:20] = np.array([-8192.0], np.float16).view(np.uint8)
    assert grouped_weights(stored, "Q4_0") is None


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q8_0], ids=lambda kind: kind.name)
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


@pytest.mark.parametrize("kind", [Q.F16, Q.F32, Q.Q5_1], ids=lambda kind: kind.name)
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

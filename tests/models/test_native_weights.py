"""Models whose weights stay as the file stores them: which do, which are rounded, and what comes out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.numpy_grouped import GroupedMatrix
from octavo.backends.numpy_ref import Int8Matrix, NumpyBackend
from octavo.backends.ops import F32, Backend, GroupedWeights
from octavo.errors import ConfigError
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model
from octavo.weights.checkpoint import expected_shapes
from octavo.weights.loader import open_checkpoint

CONFIG = ModelConfig(
    model_type="llama",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    intermediate_size=96,
    vocab_size=50,
    max_position=64,
)


class GroupedSource:
    """Random weights: 4 bits for all layers, 8 for the head. `stored_otherwise` are floats and nothing else."""

    def __init__(self, config: ModelConfig, stored_otherwise: tuple[str, ...] = ()) -> None:
        self.config = config
        self.has_grouped = True
        self.bits = {"embed": 8, "lm_head": 8}
        self._shapes = dict(expected_shapes(config))
        self._stored_otherwise = stored_otherwise

    def has(self, name: str) -> bool:
        return name in self._shapes

    def tensor(self, name: str) -> F32:
        weight = self._weight(name)
        if weight is None:
            shape = self._shapes[name]
            return (
                np.linspace(-1, 1, *shape, dtype=np.float32)
                if name.endswith("bias")
                else np.ones(shape, np.float32)
            )
        return values(GroupedMatrix(weight))

    def rows(self, name: str) -> F32:
        return self.tensor(name)

    def grouped_type(self, name: str) -> str | None:
        weight = self.grouped(name)
        return None if weight is None else weight.kind

    def grouped(self, name: str) -> GroupedWeights | None:
        return None if name in self._stored_otherwise else self._weight(name)

    def _weight(self, name: str) -> GroupedWeights | None:
        shape = self._shapes[name]
        if len(shape) < 2:
            return None
        bits = self.bits.get(name, 4)
        rng = np.random.default_rng(list(self._shapes).index(name))
        codes = rng.integers(0, 1 << bits, shape).astype(np.uint8)
        scale = (
            rng.uniform(0.5, 1.0, (shape[0], shape[1] // (16 if bits == 6 else 32))) * 0.6 / (1 << bits)
        ).astype(np.float16)
        return GroupedWeights(codes, scale, -scale * np.float16(7.5) if bits == 4 else None, bits)


def values(matrix: GroupedMatrix) -> F32:
    weight = matrix.weight
    scale = np.repeat(weight.scale.astype(np.float32), weight.group, axis=1)  # [out, in]
    if weight.low is None:
        return scale * (weight.codes.astype(np.float32) - 2 ** (weight.bits - 1))
    return scale * weight.codes + np.repeat(weight.low.astype(np.float32), weight.group, axis=1)


def test_every_matrix_stays_as_it_is_stored(caplog: pytest.LogCaptureFixture) -> None:
    source = GroupedSource(CONFIG)
    with caplog.at_level(logging.INFO):
        model = build_model(CONFIG, source, NumpyBackend(), "native")
    q, k, v = (source.tensor(f"layers.1.{part}") for part in "qkv")
    np.testing.assert_array_equal(values(model._layers[1].attention.qkv[0]), np.concatenate([q, k, v]))
    np.testing.assert_array_equal(values(model._layers[1].mlp.gate_up.up), source.tensor("layers.1.up"))
    np.testing.assert_array_equal(values(model._head), source.tensor("lm_head"))
    np.testing.assert_array_equal(values(model._embed), source.tensor("embed"))
    assert not caplog.records


def test_a_tied_head_and_the_table_are_one_packing_of_the_stored_integers() -> None:
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    source = GroupedSource(config)
    backend = NumpyBackend()
    model = build_model(config, source, backend, "native")
    assert model._embed is model._head
    np.testing.assert_array_equal(values(model._head), source.tensor("embed"))
    untied = NumpyBackend()
    build_model(CONFIG, GroupedSource(CONFIG), untied, "native")
    assert (
        untied.num_weight_bytes - backend.num_weight_bytes == 50 * 2 * 34
    )  # [V, E] in 8 bits, scales for 32


def test_queries_keys_and_values_stored_differently_are_three_matrices() -> None:
    source = GroupedSource(CONFIG)
    source.bits["layers.0.v"] = 6  # Q4_K_M files do so in half of the layers
    model = build_model(CONFIG, source, NumpyBackend(), "native")
    assert [len(layer.attention.qkv) for layer in model._layers] == [3, 1]
    for name, matrix in zip("qkv", model._layers[0].attention.qkv, strict=True):
        np.testing.assert_array_equal(values(matrix), source.tensor(f"layers.0.{name}"))


def test_what_cannot_stay_is_rounded_to_int8_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    source = GroupedSource(CONFIG, stored_otherwise=("layers.0.v", "layers.0.down", "layers.1.up"))
    with caplog.at_level(logging.INFO):
        model = build_model(CONFIG, source, NumpyBackend(), "native")
    first, second = model._layers
    assert [type(part) for part in first.attention.qkv] == [GroupedMatrix, GroupedMatrix, Int8Matrix]
    assert isinstance(first.mlp.down, Int8Matrix)
    assert isinstance(first.mlp.gate_up.gate, GroupedMatrix)
    assert isinstance(second.mlp.gate_up.gate, Int8Matrix)
    assert isinstance(second.mlp.gate_up.up, Int8Matrix)
    assert isinstance(second.attention.qkv[0], GroupedMatrix)
    logged = [record.getMessage().split(":")[0] for record in caplog.records]
    assert logged == ["layers.0.v", "layers.0.down", "layers.1.gate, layers.1.up"]


@pytest.mark.parametrize("stored_otherwise", [(), ("layers.0.q", "layers.1.down")])
@pytest.mark.parametrize("biased", [False, True])
def test_logits_are_those_of_the_stored_values(
    backend: Backend, run_model: Callable[..., F32], stored_otherwise: tuple[str, ...], biased: bool
) -> None:
    source = GroupedSource(dataclasses.replace(CONFIG, attention_bias=biased), stored_otherwise)
    source.bits |= {"layers.0.v": 6, "layers.1.o": 5, "layers.1.gate": 6, "layers.1.up": 6}
    tokens = np.random.default_rng(0).integers(0, 50, 30).astype(np.int32)
    exact = run_model(backend, build_model(source.config, source, backend, "float32"), tokens)
    native = run_model(backend, build_model(source.config, source, backend, "native"), tokens)
    assert exact.std() > 0.1
    error = (native - exact).std() / exact.std()
    assert 0 < error < 0.025, error
    chunked = run_model(
        backend, build_model(source.config, source, backend, "native"), tokens, chunk=7, block_size=3
    )
    np.testing.assert_array_equal(chunked, native)


def test_a_folder_of_floats_is_refused_with_the_remedy(golden_folder: Path) -> None:
    checkpoint = open_checkpoint(golden_folder / "tiny" / "llama")
    with pytest.raises(ConfigError, match=r"type Q4_0, Q4_1, .* or Q6_K.*use --weight-dtype int8"):
        build_model(checkpoint.config, checkpoint, NumpyBackend(), "native")

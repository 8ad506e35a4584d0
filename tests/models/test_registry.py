"""Building a model from named tensors: what is read, how it is packed, what is refused."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pytest

from octavo.backends.numpy_ref import NumpyBackend
from octavo.backends.ops import F32
from octavo.core.kv_spec import FullAttentionSpec
from octavo.errors import CorruptModelError, UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.models.registry import MODELS, build_model

CONFIG = ModelConfig(
    model_type="llama",
    hidden_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    intermediate_size=40,
    vocab_size=50,
    max_position=64,
    attention_bias=True,
    output_bias=True,
    qk_norm=True,
)

SHAPES = {
    "input_norm": (24,), "q": (32, 24), "k": (16, 24), "v": (16, 24), "o": (24, 32),
    "q.bias": (32,), "k.bias": (16,), "v.bias": (16,), "o.bias": (24,), "q_norm": (8,), "k_norm": (8,),
    "post_norm": (24,), "gate": (40, 24), "up": (40, 24), "down": (24, 40),
}  # fmt: skip


class FakeCheckpoint:
    """Random tensors made on demand; it watches how many of them are alive at a time."""

    def __init__(self, config: ModelConfig) -> None:
        self.names = {"embed": (50, 24), "norm": (24,)}
        if not config.tie_embeddings:
            self.names["lm_head"] = (50, 24)
        for i in range(config.num_layers):
            self.names |= {f"layers.{i}.{name}": shape for name, shape in SHAPES.items()}
        self.reads: list[str] = []
        self.max_alive = 0
        self._alive: weakref.WeakSet[_Tracked] = weakref.WeakSet()

    def has(self, name: str) -> bool:
        return name in self.names

    def tensor(self, name: str) -> F32:
        if name not in self.names:
            raise CorruptModelError(f"tensor {name!r} is missing")
        self.reads.append(name)
        values = np.random.default_rng(len(self.reads)).standard_normal(self.names[name])
        array = values.astype(np.float32).view(_Tracked)
        self._alive.add(array)
        self.max_alive = max(self.max_alive, len(self._alive))
        return array

    def rows(self, name: str) -> F32:
        return self.tensor(name)

    @property
    def num_alive(self) -> int:
        return len(self._alive)


class _Tracked(np.ndarray):
    """An ndarray with an identity that a WeakSet can hold."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return self is other


def test_every_tensor_is_read_once() -> None:
    checkpoint = FakeCheckpoint(CONFIG)
    build_model(CONFIG, checkpoint, NumpyBackend(), "float32")
    assert sorted(checkpoint.reads) == sorted(checkpoint.names)


def test_a_tied_head_is_packed_from_the_embedding_without_reading_it_twice() -> None:
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    checkpoint = FakeCheckpoint(config)
    model = build_model(config, checkpoint, NumpyBackend(), "float32")
    assert sorted(checkpoint.reads) == sorted(checkpoint.names)
    assert np.array_equal(model._head.weight, model._embed)


def test_float32_tensors_live_no_longer_than_their_packing() -> None:
    checkpoint = FakeCheckpoint(CONFIG)
    model = build_model(CONFIG, checkpoint, NumpyBackend(), "int8")
    assert checkpoint.num_alive == 0
    assert checkpoint.max_alive == 3  # q, k and v, or gate and up
    assert model._layers[0].attention.qkv[0].weight.shape == (64, 24)


def test_progress_counts_every_part_up_to_the_total() -> None:
    seen: list[tuple[int, int]] = []
    build_model(CONFIG, FakeCheckpoint(CONFIG), NumpyBackend(), "int8", lambda *now: seen.append(now))
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


def test_each_layer_returns_its_cache_spec() -> None:
    model = build_model(CONFIG, FakeCheckpoint(CONFIG), NumpyBackend(), "float32")
    assert model.kv_specs() == [FullAttentionSpec(num_kv_heads=2, head_size=8)] * 3
    assert model.config is CONFIG


def test_an_unknown_model_type_is_refused_with_the_list_of_known_ones() -> None:
    config = dataclasses.replace(CONFIG, model_type="gpt9")
    with pytest.raises(
        UnsupportedModelError,
        match=r"'gpt9' is not supported; supported are: bamba, gemma2, gemma3, llama, mamba2, mistral, qwen2",
    ):
        build_model(config, FakeCheckpoint(CONFIG), NumpyBackend(), "float32")
    assert len(MODELS) == 8


def test_biases_in_the_feed_forward_layers_are_refused() -> None:
    config = dataclasses.replace(CONFIG, mlp_bias=True)
    with pytest.raises(UnsupportedModelError, match="llama with biases in its feed-forward layers"):
        build_model(config, FakeCheckpoint(CONFIG), NumpyBackend(), "float32")


def test_a_missing_tensor_raises_the_checkpoints_own_error() -> None:
    checkpoint = FakeCheckpoint(CONFIG)
    del checkpoint.names["layers.2.down"]
    with pytest.raises(CorruptModelError, match=r"'layers\.2\.down' is missing"):
        build_model(CONFIG, checkpoint, NumpyBackend(), "float32")

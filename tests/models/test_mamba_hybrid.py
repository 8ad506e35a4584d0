"""Mamba2 and Bamba: tiny random checkpoints against transformers, and what their layers cache.

tools/golden/make_tiny_mamba.py made the checkpoints and the expected values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.ops import F32, Backend, WeightDtype
from octavo.core.kv_groups import KVLayer, group_layers
from octavo.core.kv_spec import KV_FORMATS, FullAttentionSpec, MambaSpec
from octavo.errors import UnsupportedModelError
from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.weights.loader import open_checkpoint

NAMES = ["bamba", "mamba2", "mamba2_groups"]

Change = Callable[[ModelConfig], ModelConfig]
Load = Callable[..., Decoder]
RunModel = Callable[..., F32]


@pytest.fixture(scope="module")
def load(golden_folder: Path) -> Load:
    def load(
        name: str,
        backend: Backend,
        weight_dtype: WeightDtype = "float32",
        change: Change = lambda config: config,
    ) -> Decoder:
        checkpoint = open_checkpoint(golden_folder / "tiny" / name)
        model = build_model(change(checkpoint.config), checkpoint, backend, weight_dtype)
        checkpoint.close()
        return model

    return load


@pytest.fixture(scope="module")
def expected(golden_folder: Path) -> Callable[[str], dict[str, np.ndarray]]:
    """expected(name) → tokens [28], logits [28, V], greedy [16]."""

    def read(name: str) -> dict[str, np.ndarray]:
        with np.load(golden_folder / "tiny" / name / "expected.npz", allow_pickle=False) as arrays:
            return dict(arrays)

    return read


@pytest.mark.parametrize("name", NAMES)
def test_exact_logits_agree_with_transformers(
    name: str, backend: Backend, load: Load, expected: Callable, run_model: RunModel
) -> None:
    want = expected(name)
    got = run_model(backend, load(name, backend), want["tokens"])
    np.testing.assert_allclose(got, want["logits"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_decoding_agrees_with_transformers(
    name: str, backend: Backend, load: Load, expected: Callable, run_model: RunModel
) -> None:
    """Each greedy token is the likeliest after all before it, the prompt in one step and then one by one."""
    want = expected(name)
    text = np.concatenate([want["tokens"], want["greedy"]])
    got = run_model(backend, load(name, backend), text, chunk=1).argmax(axis=1)
    assert np.array_equal(got[len(want["tokens"]) - 1 : -1], want["greedy"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight_dtype", ["float32", "int8"])
def test_chunks_and_block_sizes_change_no_bit(
    name: str,
    weight_dtype: WeightDtype,
    backend: Backend,
    load: Load,
    expected: Callable,
    run_model: RunModel,
) -> None:
    model, tokens = load(name, backend, weight_dtype), expected(name)["tokens"]
    whole = run_model(backend, model, tokens)
    for chunk, block_size in [(1, 16), (5, 4), (7, 1), (24, 32)]:
        assert np.array_equal(run_model(backend, model, tokens, chunk=chunk, block_size=block_size), whole)


@pytest.mark.parametrize("name", NAMES)
def test_int8_logits_stay_within_a_few_percent(
    name: str, backend: Backend, load: Load, expected: Callable, run_model: RunModel
) -> None:
    want = expected(name)
    model = load(name, backend, "int8")
    error = run_model(backend, model, want["tokens"], kv_dtype="fp16") - want["logits"]
    ratio = float(np.sqrt((error**2).mean()) / want["logits"].std())
    assert 0.001 < ratio < 0.08  # not exact: it must really have quantised


def replace_mamba(**changes: object) -> Change:
    return lambda config: dataclasses.replace(config, mamba=dataclasses.replace(config.mamba, **changes))


def turn_whole_heads(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, rope=RopeConfig(theta=config.rope.theta))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bamba", turn_whole_heads),
        ("bamba", replace_mamba(conv_bias=False)),
        ("mamba2_groups", replace_mamba(dt_min=0.0)),
        ("mamba2_groups", replace_mamba(dt_max=float("inf"))),
        ("mamba2_groups", replace_mamba(proj_bias=False)),
        ("mamba2_groups", replace_mamba(num_groups=1, state_size=24)),
    ],
)
def test_each_variant_makes_a_difference(
    name: str,
    change: Change,
    make_backend: Callable[[str], Backend],
    load: Load,
    expected: Callable,
    run_model: RunModel,
) -> None:
    """The golden values would notice if a field of the configuration were dropped on the way."""
    backend, want = make_backend("numpy"), expected(name)
    got = run_model(backend, load(name, backend, "float32", change), want["tokens"])
    assert np.abs(got - want["logits"]).max() > 0.02


def test_every_layer_of_mamba2_keeps_one_state(make_backend: Callable[[str], Backend], load: Load) -> None:
    """3 taps of 64 + 2·2·12 channels keep 2 inputs; 4 heads of 16 columns have 12 values a column."""
    model = load("mamba2_groups", make_backend("numpy"))
    assert model.kv_specs() == [MambaSpec(conv_values=2 * 112, ssm_values=64 * 12)] * 3
    assert group_layers(model.kv_specs()).layers == (KVLayer(0, 0), KVLayer(0, 1), KVLayer(0, 2))


def test_bamba_keeps_states_and_in_one_layer_keys_and_values(
    make_backend: Callable[[str], Backend], load: Load
) -> None:
    model = load("bamba", make_backend("numpy"))
    state = MambaSpec(conv_values=3 * 96, ssm_values=64 * 16)
    assert model.kv_specs() == [state, state, FullAttentionSpec(num_kv_heads=1, head_size=16), state]
    layout = group_layers(model.kv_specs())
    assert (len(layout.groups), layout.num_storages) == (4, 1)
    assert layout.bytes_per_block(16, KV_FORMATS["fp16"]) == 4 * (3 * 96 + 64 * 16)


@pytest.mark.parametrize("changes", [{"mamba": None}, {"mlp_bias": True}])
def test_what_it_cannot_run_is_refused(
    changes: dict[str, object], make_backend: Callable[[str], Backend], load: Load
) -> None:
    with pytest.raises(UnsupportedModelError, match="bamba needs state-space layers"):
        load("bamba", make_backend("numpy"), "float32", lambda c: dataclasses.replace(c, **changes))

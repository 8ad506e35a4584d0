"""What --weight-dtype auto becomes, and what is said about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.backends.numpy_ref import NumpyBackend
from octavo.config import EngineConfig
from octavo.engine.build import assemble
from octavo.engine.weight_choice import choose_weights
from octavo.models.config import ModelConfig
from octavo.weights.loader import open_checkpoint

TINY = Path(__file__).parents[1] / "golden" / "tiny"
MIB = 1 << 20
CONFIG = ModelConfig(
    model_type="llama",
    hidden_size=1024,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    head_size=256,
    intermediate_size=1024,
    vocab_size=4096,
    max_position=64,
)  # table and head of 4 Mi numbers each, seven matrices of 1 Mi: 15 MiB as int8, and 4 more for a table of float16


def choose(
    stored_mib: int, has_grouped: bool = True, config: ModelConfig = CONFIG, **options: object
) -> tuple[str, str]:
    checkpoint = SimpleNamespace(config=config, num_bytes=stored_mib * MIB, has_grouped=has_grouped)
    return choose_weights(EngineConfig(**options), checkpoint)  # type: ignore[arg-type]


def test_many_sequences_get_int8_and_hear_what_native_would_save() -> None:
    dtype, why = choose(9, max_num_seqs=5)
    assert dtype == "int8"
    assert why == (
        "weights int8 (auto): the fastest for many sequences at once; --weight-dtype native keeps the file's "
        "integers, 9 MiB instead of 19 MiB, closer to the model, the fastest for up to 4 sequences at once"
    )


def test_few_sequences_get_the_integers_of_the_file() -> None:
    dtype, why = choose(9, max_num_seqs=4)
    assert dtype == "native"
    assert why == (
        "weights native (auto): the file's integers, 9 MiB instead of 19 MiB, "
        "the fastest for up to 4 sequences at once"
    )


def test_integers_that_are_no_less_to_read_are_not_kept() -> None:
    dtype, why = choose(16, max_num_seqs=1)
    assert (dtype, why) == (
        "int8",
        "weights int8 (auto): the fastest; --weight-dtype native keeps the file's integers, 16 MiB instead of "
        "19 MiB, closer to the model",
    )


def test_a_table_that_is_the_output_matrix_as_well_counts_twice_in_float16() -> None:
    """As native its bytes are shared: 11 Mi numbers once; as int8 the head has 4 MiB and the table 8."""
    assert "9 MiB instead of 19 MiB" in choose(9, config=dataclasses.replace(CONFIG, tie_embeddings=True))[1]


def test_a_model_of_floats_gets_int8() -> None:
    dtype, why = choose(30, has_grouped=False, max_num_seqs=1)
    assert dtype == "int8"
    assert "no integers to keep" in why


@pytest.mark.parametrize("dtype", ["int8", "float32", "native"])
def test_what_is_asked_for_is_taken(dtype: str) -> None:
    assert choose(9, max_num_seqs=1, weight_dtype=dtype) == (dtype, f"weights {dtype}, as asked for")


def test_the_report_at_start_says_what_the_weights_are() -> None:
    checkpoint = open_checkpoint(TINY / "llama")
    engine = assemble(EngineConfig(num_blocks_override=40), checkpoint, NumpyBackend())
    assert choose_weights(EngineConfig(), checkpoint)[1] in engine.info.report

from __future__ import annotations

import dataclasses

import pytest

from octavo.config import EngineConfig
from octavo.core.kv_groups import group_layers
from octavo.core.kv_spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from octavo.engine import memory
from octavo.errors import ConfigError

SMOLLM = group_layers([FullAttentionSpec(num_kv_heads=3, head_size=64)] * 30)
MIB = 1 << 20


def plan(layout=SMOLLM, kv_cache_dtype="fp16", **options):
    config = dataclasses.replace(EngineConfig(), kv_cache_dtype=kv_cache_dtype, **options)
    return memory.plan_memory(config, layout, max_model_len=2048, weight_bytes=200 * MIB)


def test_block_of_smollm2_in_bytes():
    assert plan(num_blocks_override=1).block_bytes == 2 * 30 * 3 * 64 * 16 * 2
    assert plan(num_blocks_override=1, kv_cache_dtype="fp32").block_bytes == 2 * 30 * 3 * 64 * 16 * 4


def test_an_int8_cache_holds_about_twice_the_blocks_of_fp16_in_the_same_memory():
    """A key of 64 numbers takes 64 bytes and a scale of 4 instead of 128 bytes: 128 / 68 = 1.88 times."""
    half, int8 = (plan(kv_cache_memory_bytes=64 * MIB, kv_cache_dtype=dtype) for dtype in ("fp16", "int8"))
    assert int8.block_bytes == 2 * 30 * 3 * 16 * (64 + 4)
    assert (half.num_blocks, int8.num_blocks) == (182, 342)
    assert int8.report()[0].endswith("342 blocks of 16 = 5,472 tokens, 64 MiB of int8")


def test_kv_cache_memory_is_cut_into_whole_blocks():
    p = plan(kv_cache_memory_bytes=64 * MIB)
    assert p.num_blocks == 64 * MIB // 368_640 == 182
    assert p.kv_bytes <= 64 * MIB


def test_override_gives_exactly_that_many_blocks():
    assert plan(num_blocks_override=7).num_blocks == 7


def test_default_takes_a_quarter_of_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 400 * MIB)
    assert plan().num_blocks == 100 * MIB // 368_640


def test_default_never_takes_more_than_full_length_sequences_could_fill(monkeypatch):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1 << 50)
    assert plan(max_num_seqs=3).num_blocks == 3 * 128


@pytest.mark.parametrize(
    ("weights", "asked", "expected"),
    [
        ("int8", "auto", "int8"),
        ("native", "auto", "int8"),
        ("auto", "auto", "int8"),
        ("float32", "auto", "fp32"),
        ("float32", "fp16", "fp16"),
        ("int8", "fp16", "fp16"),
        ("int8", "int8", "int8"),
    ],
)
def test_kv_dtype_follows_the_weights_unless_asked(weights, asked, expected):
    assert plan(weight_dtype=weights, kv_cache_dtype=asked, num_blocks_override=1).kv_dtype == expected


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([FullAttentionSpec(2, 64), SlidingWindowSpec(2, 64, 512)], "int8"),
        ([FullAttentionSpec(2, 64), SlidingWindowSpec(2, 72, 512)], "fp16"),
        ([FullAttentionSpec(1, 256)], "fp16"),
        ([FullAttentionSpec(2, 64), MambaSpec(100, 1000)], "int8"),
        ([MambaSpec(100, 1000)], "int8"),
    ],
)
def test_keys_of_more_than_64_numbers_stay_in_fp16(specs, expected):
    assert plan(group_layers(specs), "auto", num_blocks_override=1).kv_dtype == expected


def test_memory_smaller_than_a_block_is_refused():
    with pytest.raises(ConfigError, match="one block of 16 tokens takes 368,640 bytes"):
        plan(kv_cache_memory_bytes=1000)


def test_more_memory_than_is_free_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 100 * MIB)
    with pytest.raises(ConfigError, match="asks for 200 MiB and 100 MiB are free"):
        plan(kv_cache_memory_bytes=200 * MIB)


def test_override_beyond_what_is_free_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 100 * MIB)
    with pytest.raises(ConfigError, match="--num-blocks-override 300 takes 105 MiB and 100 MiB are free"):
        plan(num_blocks_override=300)


def swap_blocks(**options):
    config = dataclasses.replace(EngineConfig(), num_blocks_override=100, **options)
    return memory.plan_swap_blocks(config, plan(num_blocks_override=100))


def test_swap_space_is_cut_into_whole_blocks():
    assert swap_blocks() == 0
    assert swap_blocks(swap_space_bytes=64 * MIB) == 64 * MIB // 368_640


def test_swap_space_smaller_than_a_block_is_refused():
    with pytest.raises(ConfigError, match="--swap-space of 1,024 bytes holds no block.* takes 368,640 bytes"):
        swap_blocks(swap_space_bytes=1024)


def test_swap_space_beyond_what_the_pool_leaves_is_refused_unless_it_is_on_disk(monkeypatch):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 100 * MIB)
    assert swap_blocks(swap_space_bytes=64 * MIB) == 182
    with pytest.raises(ConfigError, match="asks for 70 MiB and the KV cache leaves 65 MiB.*--swap-dir"):
        swap_blocks(swap_space_bytes=70 * MIB)
    assert swap_blocks(swap_space_bytes=1000 * MIB, swap_dir="/swap") == 2844


def test_report_is_words_with_numbers():
    lines = plan(num_blocks_override=1820).report()
    assert lines[0] == "weights 200 MiB, KV cache 1,820 blocks of 16 = 29,120 tokens, 640 MiB of fp16"
    assert lines[1] == "14.2 requests of the full 2,048 tokens fit at once"
    assert len(lines) == 2


def test_report_warns_when_the_pool_is_smaller_than_the_context():
    assert "at most 160 tokens" in plan(num_blocks_override=10).report()[2]


@pytest.mark.parametrize("asked", [1, 2049, -5])
def test_context_longer_than_trained_is_refused(asked):
    with pytest.raises(ConfigError, match="must lie between 2 and 2048"):
        memory.resolve_max_model_len(EngineConfig(max_model_len=asked), 2048)


def test_windows_count_for_what_a_full_length_sequence_holds():
    """5 groups of window layers hold (511 + 256) / 16 + 1 = 49 blocks each, the full one 32768 / 16 = 2048."""
    layers = ([SlidingWindowSpec(1, 256, 512)] * 5 + [FullAttentionSpec(1, 256)]) * 3
    config = dataclasses.replace(EngineConfig(), max_num_batched_tokens=256, num_blocks_override=21_845)
    p = memory.plan_memory(config, group_layers(layers), max_model_len=32_768, weight_bytes=0)
    assert p.block_bytes == 3 * 2 * 256 * 16 * 2  # 3 layers a group
    assert p.sequence_blocks == 5 * 49 + 2048
    assert p.report()[0].startswith("weights 0 MiB, KV cache 21,845 blocks of 16 = 312,174 tokens, 1,024 MiB")
    assert p.report()[1] == "9.5 requests of the full 32,768 tokens fit at once"
    assert len(p.report()) == 2


def test_a_pool_too_small_for_the_context_says_how_long_a_request_may_be_with_windows():
    layers = [SlidingWindowSpec(1, 8, 32), FullAttentionSpec(1, 8)]
    config = dataclasses.replace(EngineConfig(), max_num_batched_tokens=16, num_blocks_override=10)
    p = memory.plan_memory(config, group_layers(layers), max_model_len=2048, weight_bytes=0)
    assert p.max_request_tokens == 6 * 16  # 6 blocks, and 4 for a window of 32 and a chunk of 16
    assert "at most 96 tokens" in p.report()[2]

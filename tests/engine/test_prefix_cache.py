"""The prefix cache through the engine: hits, tenants, whole-block prompts, pressure, log-probabilities."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo.backends.native import NativeBackend
from octavo.config import EngineConfig
from octavo.core import invariants
from octavo.core.block_hash import BlockHash, hash_block
from octavo.core.delta import TokenDelta
from octavo.core.sampling_params import SamplingParams
from octavo.engine.build import assemble
from octavo.engine.engine import Engine
from octavo.engine.messages import GenerateRequest
from octavo.weights.loader import open_checkpoint

TINY = Path(__file__).parent.parent / "golden" / "tiny"
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def make(model: str = "llama", **options) -> Engine:
    defaults = {"weight_dtype": "float32", "num_blocks_override": 512, "block_size": 4, "debug": True}
    checkpoint = open_checkpoint(TINY / model)
    engine = assemble(EngineConfig(**(defaults | options)), checkpoint, NativeBackend(num_threads=1))
    checkpoint.close()
    return engine


def ask(engine: Engine, name: str, prompt: list[int], params=GREEDY, salt=None) -> tuple[list[int], int]:
    """(output tokens, cached prompt tokens) of one request alone."""
    deltas = ask_all(engine, name, prompt, params, salt)
    return [t for d in deltas for t in d.token_ids], max(d.num_cached_tokens for d in deltas)


def ask_all(engine: Engine, name: str, prompt: list[int], params=GREEDY, salt=None) -> list[TokenDelta]:
    engine.add_request(GenerateRequest(name, prompt, params, cache_salt=salt))
    deltas: list[TokenDelta] = []
    while engine.has_work:
        deltas += engine.step().deltas
    return deltas


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 95) for _ in range(length)]


@pytest.mark.parametrize(("length", "hit"), [(11, 8), (12, 8), (13, 12), (4, 0), (5, 4), (1, 0)])
def test_prompt_asked_twice_leaves_one_token_to_compute(length, hit):
    """C5: lengths k·B - 1, k·B and k·B + 1. What is cached whole still yields its logits."""
    engine = make()
    first = ask(engine, "a", prompt_of(length))
    second = ask(engine, "b", prompt_of(length))
    assert first[1] == 0
    assert second == (first[0], hit)
    invariants.check_idle(engine.scheduler.allocator)


def test_conversation_goes_on_from_its_own_answer():
    engine = make()
    prompt = prompt_of(10)
    answer, _ = ask(engine, "a", prompt)
    longer = [*prompt, *answer, 5, 6, 7]
    alone, _ = ask(make(prefix_caching=False), "b", longer)
    assert ask(engine, "b", longer) == (alone, 12)  # 15 computed positions: three full blocks


def test_salts_share_nothing_and_one_salt_shares_with_itself():
    """C2, both halves."""
    engine = make()
    prompt = prompt_of(20)
    hits = [
        ask(engine, f"{i}", prompt, salt=salt)[1] for i, salt in enumerate(("a", "b", None, "a", "b", None))
    ]
    assert hits == [0, 0, 0, 16, 16, 16]


def test_reset_forgets_every_prefix():
    engine = make()
    ask(engine, "a", prompt_of(20))
    assert engine.scheduler.allocator.clear_prefixes() == 6
    assert ask(engine, "b", prompt_of(20))[1] == 0


def test_cache_that_is_off_finds_nothing():
    engine = make(prefix_caching=False)
    ask(engine, "a", prompt_of(20))
    assert ask(engine, "b", prompt_of(20))[1] == 0


def weak_hash(parent: BlockHash, token_ids: tuple[int, ...]) -> BlockHash:
    return BlockHash(hash_block(parent, token_ids) & 0xFF)


@pytest.mark.parametrize("model", ["llama", "gemma3", "bamba"])
@pytest.mark.parametrize("hash_function", [hash_block, weak_hash])
def test_outputs_under_pressure_equal_those_of_a_large_pool_without_cache(model, hash_function):
    """B4, C1, C6: shared prefixes, a pool a little larger than what runs, an 8-bit hash; 60 requests at once."""
    rng = random.Random(4)
    heads = [prompt_of(rng.randint(4, 24), seed) for seed in range(5)]
    prompts = [rng.choice(heads) + prompt_of(rng.randint(1, 9), 100 + i) for i in range(60)]
    oracle = make(model, prefix_caching=False, num_blocks_override=4000)
    expected = [ask(oracle, f"{i}", p)[0] for i, p in enumerate(prompts)]
    # Layers with windows or states take more blocks for the same tokens.
    num_blocks = {"llama": 30, "gemma3": 120, "bamba": 60}[model]
    engine = make(model, num_blocks_override=num_blocks, max_num_batched_tokens=32, max_num_seqs=16)
    engine.scheduler.allocator.index._hash = hash_function
    found: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        engine.add_request(GenerateRequest(f"{i}", prompt, GREEDY))
    while engine.has_work:
        for delta in engine.step().deltas:
            found[int(delta.request_id)] += delta.token_ids
    assert found == expected
    assert engine.scheduler.counters.num_prompt_tokens_cached > 0
    invariants.check_idle(engine.scheduler.allocator)


def test_prompt_log_probabilities_are_whole_and_equal_on_a_second_request():
    """C9: they need every row, so such a request does not read the cache; it does fill it."""
    engine = make()
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    first, second = (ask_all(engine, name, prompt_of(14), params)[0] for name in "ab")
    assert len(first.prompt_logprobs) == 13
    assert second.prompt_logprobs == first.prompt_logprobs
    assert second.num_cached_tokens == 0
    assert ask(engine, "c", prompt_of(14))[1] == 12


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("model", ["llama", "mistral_window", "gemma3", "bamba"])
def test_every_block_size_works_with_every_kind_of_layer(model, block_size):
    """E7."""
    engine = make(model, block_size=block_size, num_blocks_override=-(-4096 // block_size) + 64)
    expected = ask(make(model, prefix_caching=False), "a", prompt_of(40))[0]
    assert ask(engine, "a", prompt_of(40))[0] == expected
    assert ask(engine, "b", prompt_of(40))[0] == expected

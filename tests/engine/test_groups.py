"""n choices, best_of and beam search on real (tiny) models: the values of transformers, and the same tokens when
every step preempts somebody, in every mode, with the prefix cache and without."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.backends.native import NativeBackend
from octavo.config import EngineConfig
from octavo.core import invariants
from octavo.core.delta import TokenDelta
from octavo.core.sampling_params import SamplingParams
from octavo.engine import build
from octavo.engine.engine import Engine
from octavo.engine.messages import GenerateRequest
from octavo.errors import ModelNotFoundError
from octavo.sched.budget import SchedulerConfig
from octavo.weights import hub
from octavo.weights.loader import open_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden"
BEAM_CASES = [
    c for c in json.loads((GOLDEN / "beam.json").read_text())["cases"] if c["model"].startswith("tiny/")
]
STRESSED = [(mode, cached) for mode in ("recompute", "swap", "auto") for cached in (True, False)]


def make_engine(path: Path, monkeypatch: pytest.MonkeyPatch | None = None, **options: Any) -> Engine:
    """In exact mode and debug; with `monkeypatch` every step preempts whoever has made progress."""
    if monkeypatch is not None:

        def stressed(*args: Any) -> SchedulerConfig:
            return dataclasses.replace(SchedulerConfig(*args), force_preemption=True)

        monkeypatch.setattr(build, "SchedulerConfig", stressed)
    defaults = {"weight_dtype": "float32", "num_blocks_override": 256, "block_size": 4, "debug": True}
    checkpoint = open_checkpoint(path)
    engine = build.assemble(EngineConfig(**(defaults | options)), checkpoint, NativeBackend(num_threads=1))
    checkpoint.close()
    return engine


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[dict[int, list[int]]]:
    """Tokens by choice, for each request; nothing may be left behind."""
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(GenerateRequest(str(i), prompt, params))
    found: list[dict[int, list[int]]] = [{} for _ in requests]
    for delta in drain(engine):
        found[int(delta.request_id)].setdefault(delta.choice, []).extend(delta.token_ids)
    return found


def drain(engine: Engine) -> list[TokenDelta]:
    deltas = []
    while engine.has_work:
        deltas += engine.step().deltas
    assert not any(d.error for d in deltas)
    invariants.check_idle(engine.scheduler.allocator)
    assert engine.scheduler.swap.num_used == 0
    assert engine.executor.num_sequences == 0
    return deltas


def beam_params(case: dict[str, Any]) -> SamplingParams:
    ends = tuple(case.get("end_ids", ()))
    return SamplingParams(
        n=case["width"],
        beam_width=case["width"],
        length_penalty=case.get("length_penalty", 1.0),
        early_stopping=case.get("early_stopping", False),
        stop_token_ids=ends,
        ignore_eos=True,
        max_tokens=case.get("max_tokens", 12),
        min_tokens=case.get("min_tokens", 0),
    )


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_beam_search_gives_the_sequences_and_scores_of_transformers(model):
    """F6. All searches run at once: beams of different requests share the pool and the steps."""
    cases = [c for c in BEAM_CASES if c["model"] == f"tiny/{model}"]
    assert {c["width"] for c in cases} >= {2, 4, 8}
    engine = make_engine(GOLDEN / "tiny" / model, max_num_seqs=200, num_blocks_override=2000)
    for i, case in enumerate(cases):
        engine.add_request(GenerateRequest(str(i), case["prompt"], beam_params(case)))
    deltas = drain(engine)
    for i, case in enumerate(cases):
        mine = sorted((d for d in deltas if d.request_id == str(i)), key=lambda d: d.choice)
        assert [list(d.token_ids) for d in mine] == case["sequences"], case
        assert [d.score for d in mine] == pytest.approx(case["scores"], abs=3e-4), case


REQUESTS = [
    (
        [5, 17, 42, 90, 3, 8, 61],
        SamplingParams(n=4, seed=1, temperature=0.9, max_tokens=14, ignore_eos=True, logprobs=5),
    ),
    ([7, 7, 9], SamplingParams(n=4, beam_width=4, max_tokens=12, ignore_eos=True)),
    ([11, 12, 13, 14, 15], SamplingParams(n=2, best_of=3, seed=5, max_tokens=9, ignore_eos=True)),
    (
        [5, 17, 42, 90, 3, 8, 61, 20],
        SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True, logprobs=5),
    ),
]
Record = list[tuple]  # everything a client sees, floats included: equal records mean equal logits


def record(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> Record:
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(GenerateRequest(str(i), prompt, params))
    seen = [
        (
            d.request_id,
            d.choice,
            d.token_ids,
            d.score,
            d.finish_reason,
            [(p.logprob, p.top) for p in d.logprobs or ()],
        )
        for d in drain(engine)
    ]
    return sorted(seen, key=lambda r: r[:2])  # by choice; within one in order of time


@pytest.mark.parametrize(("mode", "cached"), STRESSED)
@pytest.mark.parametrize("model", ["llama", "mistral_window", "gemma3", "bamba", "mamba2"])
def test_preemption_at_every_step_changes_nothing(monkeypatch, model, mode, cached):
    pool = {"num_blocks_override": 1024}
    undisturbed = record(make_engine(GOLDEN / "tiny" / model, **pool), REQUESTS)
    options = {"preemption_mode": mode, "prefix_caching": cached, "swap_space_bytes": 1 << 26} | pool
    engine = make_engine(GOLDEN / "tiny" / model, monkeypatch, **options)
    assert record(engine, REQUESTS) == undisturbed
    assert engine.scheduler.counters.num_preemptions > 20


@pytest.mark.model
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("model", ["smollm2", "gemma3-270m"])
def test_real_models_preempted_at_every_step(monkeypatch, model, mode):
    try:
        path = hub.resolve(model, offline=True)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    requests = [
        ([5, 17, 42], SamplingParams(n=4, seed=1, max_tokens=5, ignore_eos=True, logprobs=3)),
        ([900, 301, 77, 4], SamplingParams(n=2, beam_width=4, max_tokens=5, ignore_eos=True)),
    ]
    undisturbed = record(make_engine(path), requests)
    engine = make_engine(path, monkeypatch, preemption_mode=mode, swap_space_bytes=1 << 28)
    assert record(engine, requests) == undisturbed
    assert engine.scheduler.counters.num_preemptions >= 8


def test_choices_of_one_seed_differ_and_repeat(monkeypatch):
    """F1, F2: n distinct choices; the same again in another run."""
    params = SamplingParams(n=8, seed=1, temperature=1.0, max_tokens=10, ignore_eos=True)
    first, second = (run(make_engine(GOLDEN / "tiny" / "llama"), [([1, 2, 3], params)]) for _ in range(2))
    assert first == second
    assert sorted(first[0]) == list(range(8))
    assert len({tuple(tokens) for tokens in first[0].values()}) == 8


def test_choice_depends_on_its_index_not_on_how_many_there_are():
    few = run(make_engine(GOLDEN / "tiny" / "llama"), [([1, 2, 3], SamplingParams(n=2, seed=9))])
    many = run(make_engine(GOLDEN / "tiny" / "llama"), [([1, 2, 3], SamplingParams(n=5, seed=9))])
    assert few[0] == {i: many[0][i] for i in range(2)}


def test_best_of_returns_the_most_likely_choices_best_first():
    base = SamplingParams(n=6, seed=3, temperature=1.2, max_tokens=8, ignore_eos=True, logprobs=0)
    engine = make_engine(GOLDEN / "tiny" / "llama")
    engine.add_request(GenerateRequest("a", [4, 5, 6], base))
    sums: dict[int, float] = dict.fromkeys(range(6), 0.0)
    tokens: dict[int, list[int]] = {i: [] for i in range(6)}
    for delta in drain(engine):
        sums[delta.choice] += sum(p.logprob for p in delta.logprobs or ())
        tokens[delta.choice] += delta.token_ids
    ranked = sorted(sums, key=lambda i: -sums[i])
    chosen = dataclasses.replace(base, n=2, best_of=6, logprobs=None)
    found = run(make_engine(GOLDEN / "tiny" / "llama"), [([4, 5, 6], chosen)])
    assert found[0] == {0: tokens[ranked[0]], 1: tokens[ranked[1]]}


def test_beams_share_blocks_and_copy_only_on_write():
    """Width 4 over ten steps: the prompt's blocks have four holders, and copies are only of partial blocks."""
    engine = make_engine(GOLDEN / "tiny" / "llama")
    engine.add_request(
        GenerateRequest("a", list(range(1, 9)), SamplingParams(beam_width=4, max_tokens=11, ignore_eos=True))
    )
    manager = engine.scheduler.allocator
    for _ in range(10):
        engine.step()
        tables = [t[0].block_ids for t in manager.tables.values()]
        assert len(tables) == 4
        assert {tuple(t[:2]) for t in tables} == {tuple(tables[0][:2])}, "the prompt is stored once"
        assert manager.pool.ref_count(tables[0][0]) == 4
    saved = 4 * len(tables[0]) - manager.pool.num_used
    assert manager.stats().num_blocks_saved == saved >= 6
    drain(engine)


@pytest.mark.parametrize("seed", range(8))
def test_cancelling_at_a_random_moment_leaves_nothing(monkeypatch, seed):
    """25 cancellations a seed: waiting, mid-prompt, running, swapped, n = 4, beams."""
    import random

    rng = random.Random(seed)
    engine = make_engine(
        GOLDEN / "tiny" / "llama",
        num_blocks_override=40,
        max_num_batched_tokens=16,
        max_num_seqs=16,
        preemption_mode=rng.choice(["swap", "recompute"]),
        swap_space_bytes=1 << 20,
    )
    kinds = [{"n": 4}, {"beam_width": 4, "n": 2}, {}, {"n": 2, "best_of": 3}]
    alive: list[str] = []
    num_cancelled = 0
    while num_cancelled < 25:
        name = f"r{num_cancelled}-{rng.random()}"
        prompt = [rng.randrange(3, 120) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=True, **rng.choice(kinds))
        engine.add_request(GenerateRequest(name, prompt, params))
        alive.append(name)
        for _ in range(rng.randrange(5)):
            engine.step()
        if len(alive) > 3:
            num_cancelled += engine.abort(alive.pop(rng.randrange(len(alive))))
    drain(engine)


@pytest.mark.parametrize("direction", ["write", "read"])
def test_disk_that_fails_costs_a_recomputation_and_a_warning(monkeypatch, tmp_path, caplog, direction):
    undisturbed = run(make_engine(GOLDEN / "tiny" / "llama"), REQUESTS)
    options = {"preemption_mode": "swap", "swap_space_bytes": 1 << 24, "swap_dir": str(tmp_path)}
    engine = make_engine(GOLDEN / "tiny" / "llama", monkeypatch, prefix_caching=False, **options)
    calls = 0
    real = getattr(engine.executor._swap_store, direction)

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 7 == 3:
            raise OSError(5, "Input/output error")
        return real(*args)

    monkeypatch.setattr(engine.executor._swap_store, direction, failing)
    assert run(engine, REQUESTS) == undisturbed
    assert engine.scheduler.counters.num_preemptions_swap > 0
    assert engine.scheduler.counters.num_recomputed_tokens > 0
    assert "swap space failed ([Errno 5] Input/output error): the requests are recomputed" in caplog.text

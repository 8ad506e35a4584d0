"""The engine in its own process, through the real socket, on a tiny model with the NumPy backend."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.core.sampling_params import SamplingParams
from octavo.engine.client import ProcessEngine
from octavo.engine.messages import GenerateRequest, StepStats
from octavo.errors import ConfigError, EngineError, ModelNotFoundError, RequestError

TINY = Path(__file__).parent.parent / "golden" / "tiny" / "llama"
CONFIG = EngineConfig(
    backend="numpy", weight_dtype="float32", num_blocks_override=40, max_num_seqs=4, max_num_batched_tokens=32
)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@asynccontextmanager
async def running_engine(
    config: EngineConfig = CONFIG,
) -> AsyncIterator[tuple[ProcessEngine, list[StepStats]]]:
    engine = await ProcessEngine.start(config, TINY)
    stats: list[StepStats] = []
    engine.add_stats_listener(stats.append)
    try:
        yield engine, stats
    finally:
        await engine.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def collect(engine: ProcessEngine, name: str, prompt: list[int], params=GREEDY) -> list[int]:
    return [t async for d in engine.generate(GenerateRequest(name, prompt, params)) for t in d.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_concurrent_requests_get_what_each_gets_alone():
    async def test() -> None:
        async with running_engine() as (engine, _):
            prompts = [[1 + i, 2, 3 + i] for i in range(6)]
            alone = [await collect(engine, f"a{i}", p) for i, p in enumerate(prompts)]
            together = await asyncio.gather(*(collect(engine, f"b{i}", p) for i, p in enumerate(prompts)))
            assert together == alone
            assert all(len(tokens) == 8 for tokens in alone)

    run(test)


def test_info_says_what_the_engine_is():
    async def test() -> None:
        async with running_engine() as (engine, _):
            assert (engine.info.num_blocks, engine.info.block_size) == (40, 16)
            assert "KV cache 40 blocks of 16 = 640 tokens" in engine.info.report[0]

    run(test)


def test_closing_the_iterator_aborts_and_frees_the_blocks():
    async def test() -> None:
        async with running_engine() as (engine, stats):
            long = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
            stream = engine.generate(GenerateRequest("a", [1, 2, 3], long))
            await anext(stream)
            await stream.aclose()
            await until(lambda: stats[-1].blocks_used == 0)
            assert stats[-1].requests_running == 0
            assert stats[-1].generated_tokens_total < 100
            assert sum((s.finished.get("abort", 0) for s in stats), 0) == 1

    run(test)


def test_refused_request_raises_with_its_field_and_harms_nobody():
    async def test() -> None:
        async with running_engine() as (engine, _):
            with pytest.raises(RequestError, match="token id 999999") as caught:
                await collect(engine, "a", [999999])
            assert caught.value.param == "prompt"
            assert len(await collect(engine, "b", [1])) == 8

    run(test)


def test_killed_engine_fails_the_running_requests_and_is_seen():
    async def test() -> None:
        async with running_engine() as (engine, _):
            long = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
            stream = engine.generate(GenerateRequest("a", [1, 2, 3], long))
            await anext(stream)
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="the engine process has ended"):
                async for _ in stream:
                    pass
            assert not engine.is_alive
            with pytest.raises(EngineError):
                await collect(engine, "b", [1])

    run(test)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_leaves_the_end_to_the_server(number: signal.Signals):
    """A supervisor's SIGTERM reached the engine too, and the server ended with an error instead of 0."""

    async def test() -> None:
        async with running_engine() as (engine, _):
            os.kill(engine.pid, number)
            assert len(await collect(engine, "a", [1, 2, 3])) == 8

    run(test)


def test_engine_process_ends_when_its_client_is_gone():
    async def test() -> None:
        async with running_engine() as (engine, _):
            engine._writer.close()  # as if the server had died
            await asyncio.wait_for(engine._process.wait(), 10)

    run(test)


def test_missing_model_raises_as_in_this_process():
    async def test() -> None:
        with pytest.raises(ModelNotFoundError, match="no such file"):
            await ProcessEngine.start(CONFIG, Path("/no/such/model.gguf"))

    run(test)


def test_wrong_configuration_raises_as_in_this_process():
    async def test() -> None:
        with pytest.raises(ConfigError, match="--block-size must be at least 1, got 0"):
            await ProcessEngine.start(EngineConfig(backend="numpy", block_size=0), TINY)

    run(test)


def test_a_choice_that_is_ended_stops_alone_and_the_iterator_ends_with_the_last():
    async def test() -> None:
        async with running_engine() as (engine, stats):
            params = SamplingParams(n=3, max_tokens=40, temperature=0.0, ignore_eos=True)
            counts = dict.fromkeys(range(3), 0)
            async for delta in engine.generate(GenerateRequest("a", [1, 2, 3], params)):
                counts[delta.choice] += len(delta.token_ids)
                for index in (0, 2):
                    if delta.choice == index and counts[index] == 2 + index:
                        engine.end_choice("a", index)
            assert counts == {0: 2, 1: 40, 2: 4}
            await until(lambda: stats[-1].blocks_used == 0)
            assert stats[-1].generated_tokens_total < 40 + 2 * 20
            engine.end_choice("a", 1)  # it is over: nothing happens
            await collect(engine, "b", [4])
            assert sum((s.finished.get("length", 0) for s in stats), 0) == 2

    run(test)


def test_the_last_choice_that_is_ended_ends_the_request_as_stopped():
    async def test() -> None:
        async with running_engine() as (engine, stats):
            params = SamplingParams(n=2, max_tokens=50, temperature=0.0, ignore_eos=True)
            async for delta in engine.generate(GenerateRequest("a", [1, 2, 3], params)):
                engine.end_choice("a", delta.choice)
            await until(lambda: stats[-1].blocks_used == 0)
            assert sum((s.finished.get("stop", 0) for s in stats), 0) == 1
            assert sum((s.finished.get("abort", 0) for s in stats), 0) == 0

    run(test)


def test_choices_beams_and_best_of_come_whole_through_the_process():
    """F1, F10: n choices for each, and as many ends."""

    async def test() -> None:
        async with running_engine() as (engine, stats):
            for name, fields in (
                ("n", {"n": 4}),
                ("best_of", {"n": 2, "best_of": 4}),
                ("beam", {"n": 3, "beam_width": 4}),
            ):
                params = SamplingParams(seed=1, max_tokens=6, ignore_eos=True, **fields)
                deltas = [d async for d in engine.generate(GenerateRequest(name, [1, 2, 3], params))]
                tokens = {
                    i: [t for d in deltas if d.choice == i for t in d.token_ids] for i in range(params.n)
                }
                assert [len(t) for t in tokens.values()] == [6] * params.n
                assert len({tuple(t) for t in tokens.values()}) == params.n
                assert sorted(d.choice for d in deltas if d.finish_reason) == list(range(params.n))
            await until(lambda: stats[-1].blocks_used == 0)

    run(test)


def test_the_prefix_cache_is_reset_and_the_figures_follow():
    async def test() -> None:
        async with running_engine() as (engine, stats):
            await collect(engine, "a", list(range(1, 40)))
            assert stats[-1].blocks_cached == 2
            assert await engine.reset_prefix_cache() == 2
            await until(lambda: stats[-1].blocks_cached == 0)
            assert await engine.reset_prefix_cache() == 0

    run(test)


def test_a_snapshot_shows_the_running_requests():
    async def test() -> None:
        async with running_engine() as (engine, _):
            idle = await engine.snapshot()
            assert (len(idle.ref_counts), idle.block_size, idle.tables) == (40, 16, [])
            long = SamplingParams(max_tokens=60, n=2, temperature=0.0, ignore_eos=True)
            stream = engine.generate(GenerateRequest("a", [1, 2, 3], long))
            await anext(stream)
            shown = await engine.snapshot()
            assert [(t.request_id, t.choice) for t in shown.tables] == [("a", 0), ("a", 1)]
            await stream.aclose()

    run(test)


def test_calls_of_a_dead_engine_raise():
    async def test() -> None:
        async with running_engine() as (engine, _):
            calls = [asyncio.ensure_future(engine.snapshot()) for _ in range(3)]
            os.kill(engine.pid, signal.SIGKILL)
            assert await engine.ended() == "the engine process was killed (SIGKILL: did memory run out?)"
            await asyncio.gather(*calls, return_exceptions=True)  # answered before, or failed: none hangs
            with pytest.raises(EngineError, match="has ended"):
                await engine.reset_prefix_cache()

    run(test)


@pytest.fixture
def sabotage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Python that engine processes run first."""

    def plant(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return plant


BROKEN_STEP = """
from octavo.engine.engine import Engine
def step(self):
    raise KeyError("a fault")
Engine.step = step
"""
BROKEN_LOAD = """
import octavo.engine.build
def assemble(*args):
    raise ZeroDivisionError("a fault")
octavo.engine.build.assemble = assemble
"""


@pytest.mark.parametrize("debug", [False, True])
def test_a_fault_in_the_step_loop_is_said_on_one_line(sabotage, capfd, debug):
    sabotage(BROKEN_STEP)

    async def test() -> None:
        async with running_engine(dataclasses.replace(CONFIG, debug=debug)) as (engine, _):
            expected = "the engine failed: KeyError: 'a fault' (sitecustomize.py:4)"
            with pytest.raises(EngineError) as caught:
                await collect(engine, "a", [1])
            assert str(caught.value) == expected
            assert await engine.ended() == expected
            assert not engine.is_alive

    run(test)
    assert ("Traceback" in capfd.readouterr().err) == debug


@pytest.mark.parametrize("debug", [False, True])
def test_a_fault_while_loading_is_said_on_one_line(sabotage, capfd, debug):
    sabotage(BROKEN_LOAD)

    async def test() -> None:
        with pytest.raises(EngineError) as caught:
            await ProcessEngine.start(dataclasses.replace(CONFIG, debug=debug), TINY)
        assert str(caught.value) == (
            "the model could not be loaded: ZeroDivisionError: a fault (sitecustomize.py:4)"
        )

    run(test)
    assert ("Traceback" in capfd.readouterr().err) == debug


def test_a_process_that_dies_while_loading_says_how(sabotage):
    sabotage("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")

    async def test() -> None:
        with pytest.raises(EngineError, match="was ended by SIGSEGV while it loaded the model"):
            await ProcessEngine.start(CONFIG, TINY)

    run(test)

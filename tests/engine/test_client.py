"""The engine in its own process, through the real socket, on a tiny model with the NumPy backend."""

from __future__ import annotations

import asyncio
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

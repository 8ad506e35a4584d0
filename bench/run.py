"""`make bench`: how fast the engine is on this machine, as a table and as JSON in build/bench/.

    .venv/bin/python bench/run.py [--concurrency 1,8,32] [--prefill 32,128,512] [--weight-dtype int8] …

A closed loop in process: `c` requests at a time, 4·c in all, prompts of 20 to 300 random words, 16 to 200 output
tokens, greedy, end-of-sequence ignored. Prefill is one prompt of exactly n tokens, one output token. Figures
of shared machines vary: compare only what was measured side by side, and report the ratio.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

from load import requests
from rich.console import Console
from rich.table import Table

from octavo.config import EngineConfig
from octavo.core.sampling_params import SamplingParams
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.engine.messages import GenerateRequest
from octavo.text.tokenizer import Tokenizer
from octavo.weights import hub
from octavo.weights.loader import open_checkpoint

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    what: str
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    ttft_ms_p50: float | None = None
    step_ms_p50: float | None = None
    schedule_share: float | None = None  # scheduling and bookkeeping, of the time in steps


def encoded(tokenizer: Tokenizer, count: int, seed: int) -> Iterator[GenerateRequest]:
    for i, (text, max_tokens) in enumerate(requests(count, seed)):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        yield GenerateRequest(f"{seed}-{i}", tokenizer.encode(text), params)


def closed_loop(engine: Engine, waiting: Iterator[GenerateRequest], concurrency: int) -> Row:
    started, first, num_tokens = {}, [], 0
    steps: list[float] = []
    schedule_s = 0.0
    begin = monotonic()
    running = 0
    while True:
        while running < concurrency and (request := next(waiting, None)) is not None:
            engine.add_request(request)
            started[request.request_id] = monotonic()
            running += 1
        if not running:
            break
        outputs = engine.step()
        assert outputs.stats is not None
        steps.append(outputs.stats.step_s)
        schedule_s += outputs.stats.schedule_s
        for delta in outputs.deltas:
            num_tokens += len(delta.token_ids)
            if delta.request_id in started:
                first.append(monotonic() - started.pop(delta.request_id))
            running -= delta.finish_reason is not None
    return Row(
        what=f"serve, c={concurrency}",
        output_tokens_per_s=num_tokens / (monotonic() - begin),
        ttft_ms_p50=1e3 * median(first),
        step_ms_p50=1e3 * median(steps),
        schedule_share=schedule_s / sum(steps),
    )


def prefill(engine: Engine, num_tokens: int, seed: int) -> Row:
    """The best of five prompts of random tokens, none of them cached."""
    rng = random.Random(seed)
    best = float("inf")
    for i in range(5):
        prompt = [rng.randrange(100, engine.info.vocab_size) for _ in range(num_tokens)]
        params = SamplingParams(max_tokens=1, temperature=0.0)
        engine.add_request(GenerateRequest(f"p{num_tokens}-{i}", prompt, params))
        begin = monotonic()
        while engine.has_work:
            engine.step()
        best = min(best, monotonic() - begin)
    return Row(what=f"prefill, {num_tokens} tokens", prompt_tokens_per_s=num_tokens / best)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def machine() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.machine()
    )
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {"cpu": model, "python": platform.python_version(), "commit": commit.stdout.strip() or "unknown"}


def show(rows: list[Row], console: Console) -> None:
    table = Table("", "output tok/s", "prompt tok/s", "first token, ms", "step, ms", "scheduling")
    for row in rows:
        table.add_row(
            row.what,
            *(
                "" if v is None else f"{v:,.1f}"
                for v in (
                    row.output_tokens_per_s,
                    row.prompt_tokens_per_s,
                    row.ttft_ms_p50,
                    row.step_ms_p50,
                )
            ),
            "" if row.schedule_share is None else f"{row.schedule_share:.1%}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the engine on this machine.")
    parser.add_argument("--model", default="", help="as for octavo serve")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--prefill", default="32,128,512")
    parser.add_argument("--weight-dtype", default="int8")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    path = hub.resolve(args.model)
    checkpoint = open_checkpoint(path)
    tokenizer = checkpoint.tokenizer()
    checkpoint.close()
    config = EngineConfig(
        weight_dtype=args.weight_dtype,
        block_size=args.block_size,
        num_threads=args.threads,
        kv_cache_memory_bytes=2 << 30,
        prefix_caching=False,
    )
    console = Console()
    begin = monotonic()
    engine = build_engine(config, path)
    console.print(f"loaded in {monotonic() - begin:.1f} s: " + "; ".join(engine.info.report))
    closed_loop(engine, encoded(tokenizer, 2, seed=99), 2)  # warm up
    rows = [
        closed_loop(engine, encoded(tokenizer, max(6, 4 * c), seed=c), c)
        for c in map(int, args.concurrency.split(","))
    ]
    rows += [prefill(engine, n, seed=n) for n in map(int, args.prefill.split(","))]
    show(rows, console)
    folder = ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "flags": vars(args), "rows": [asdict(r) for r in rows]}
    (folder / "engine.json").write_text(json.dumps(result, indent=2))
    console.print(f"written to {folder.relative_to(ROOT)}/engine.json")


if __name__ == "__main__":
    main()

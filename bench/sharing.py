"""How much memory sharing saves: n choices and beams of one prompt, against each having its own copy.

    .venv/bin/python bench/sharing.py [--groups 8]

Runs the real engine on the default model with prompt and output lengths like those of the two data sets of the
PagedAttention paper (lognormal; means 19 in and 58 out for Alpaca, 161 and 338 for ShareGPT). At every step the
pool counts blocks used and blocks that sharing saves; saved / (used + saved), averaged over the steps, is the
paper's figure (its Fig. 15: 6-10 % and 38-55 % for Alpaca, 16-31 % and 44-66 % for ShareGPT).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from load import WORDS
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
LENGTHS = {"Alpaca": (19.3, 58.5), "ShareGPT": (161.3, 338.0)}  # mean prompt and output tokens
SPREAD = 1.0  # sigma of the lognormal


def length(rng: random.Random, mean: float, most: int) -> int:
    mu = 0.0
    drawn = rng.lognormvariate(mu, SPREAD) * mean / 2.718281828 ** (SPREAD**2 / 2)
    return max(1, min(most, round(drawn)))


def prompt(rng: random.Random, tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    text = " ".join(rng.choice(WORDS) for _ in range(num_tokens + 8))
    return tokenizer.encode(text)[:num_tokens]


def measure(
    engine: Engine, tokenizer: Tokenizer, data: str, params: dict[str, int], groups: int
) -> dict[str, float]:
    """Keep `groups` requests running; count only while all are."""
    rng = random.Random(1)
    mean_in, mean_out = LENGTHS[data]
    used = saved = sequences = steps = 0
    num_started, running = 0, 0
    while num_started < 3 * groups or running:
        while running < groups and num_started < 3 * groups:
            wanted = SamplingParams(
                max_tokens=length(rng, mean_out, 1024),
                temperature=1.0,
                seed=num_started,
                ignore_eos=True,
                **params,
            )
            ids = prompt(rng, tokenizer, length(rng, mean_in, 1024))
            engine.add_request(GenerateRequest(f"{data}-{params}-{num_started}", ids, wanted))
            num_started, running = num_started + 1, running + 1
        outputs = engine.step()
        if running == groups:
            cache = engine.scheduler.allocator.stats()
            used += cache.num_blocks_used
            saved += cache.num_blocks_saved
            sequences += engine.scheduler.num_running_seqs
            steps += 1
        ended = {d.request_id for d in outputs.deltas if d.finish_reason}
        running -= sum(engine.scheduler.request(r) is None for r in ended)
    return {"saved": saved / (used + saved), "more": (used + saved) / used, "sequences": sequences / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what sharing saves.")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--widths", default="2,4,6")
    args = parser.parse_args()
    path = hub.resolve("")
    checkpoint = open_checkpoint(path)
    tokenizer = checkpoint.tokenizer()
    checkpoint.close()
    engine = build_engine(EngineConfig(kv_cache_memory_bytes=2 << 30, prefix_caching=False), path)
    table = Table("lengths", "decoding", "blocks saved", "sequences in the same pool")
    rows = []
    for data in LENGTHS:
        for kind, name in (("n", "n"), ("beam_width", "beam")):
            for width in map(int, args.widths.split(",")):
                found = measure(engine, tokenizer, data, {kind: width}, args.groups)
                rows.append({"lengths": data, "decoding": f"{name}={width}"} | found)
                table.add_row(data, f"{name}={width}", f"{found['saved']:.1%}", f"{found['more']:.2f}x")
    Console().print(table)
    folder = ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sharing.json").write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()

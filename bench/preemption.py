"""Swap against recomputation: the time one preempted request needs until it goes on, by block size.

    .venv/bin/python bench/preemption.py [--tokens 64,256,1024] [--blocks 1,8,16,64,256]

One request with a prompt of n tokens is preempted right after its first token and resumed. The figure is the
time from that moment to its second token, less an undisturbed step: out and in again, or computing it again. Then
`auto` chooses by its own measured prices; `auto / best` is what its choices cost against the better of the two.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.table import Table

from octavo.backends.native import NativeBackend
from octavo.config import EngineConfig
from octavo.core.sampling_params import SamplingParams
from octavo.engine.build import assemble
from octavo.engine.engine import Engine
from octavo.engine.messages import GenerateRequest
from octavo.weights import hub
from octavo.weights.loader import open_checkpoint

ROOT = Path(__file__).resolve().parent.parent
MODES = ("recompute", "swap", "auto")


def resume_s(engine: Engine, num_tokens: int, seed: int) -> tuple[float, str]:
    """Seconds that one preemption costs, and what was chosen."""
    rng = random.Random(seed)
    prompt = [rng.randrange(100, engine.info.vocab_size) for _ in range(num_tokens)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine.add_request(GenerateRequest(f"{num_tokens}-{seed}", prompt, params))
    while not engine.step().deltas:
        pass
    begin = monotonic()
    engine.step()  # undisturbed
    plain_s = monotonic() - begin
    engine.scheduler.preempt(f"{num_tokens}-{seed}")
    begin = monotonic()
    decision = ""
    while True:
        outputs = engine.step()
        decision = engine.scheduler.preemptions[0].mode if engine.scheduler.preemptions else decision
        if outputs.deltas:
            break
    cost = monotonic() - begin - plain_s
    while engine.has_work:
        engine.step()
    return cost, decision


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure swapping against recomputation.")
    parser.add_argument("--tokens", default="64,256,1024")
    parser.add_argument("--blocks", default="1,8,16,64,256")
    parser.add_argument("--swap-dir", default=None)
    args = parser.parse_args()
    path = hub.resolve("")
    table = Table(
        "block size", "tokens", "recompute, ms", "swap, ms", "auto, ms", "auto chose", "auto / best"
    )
    rows = []
    for block_size in map(int, args.blocks.split(",")):
        engines = {mode: _engine(path, block_size, mode, args.swap_dir) for mode in MODES}
        for num_tokens in map(int, args.tokens.split(",")):
            cost, chose = {}, ""
            for mode in MODES:
                measured = [resume_s(engines[mode], num_tokens, seed) for seed in range(7)]
                cost[mode] = sorted(s for s, _ in measured)[len(measured) // 2]
                chose = measured[-1][1]
            ratio = cost["auto"] / min(cost["swap"], cost["recompute"])
            rows.append({"block_size": block_size, "tokens": num_tokens, "auto_chose": chose, **cost})
            table.add_row(
                str(block_size),
                str(num_tokens),
                *(f"{1e3 * cost[m]:.2f}" for m in MODES),
                chose,
                f"{ratio:.2f}",
            )
    Console().print(table)
    folder = ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "preemption.json").write_text(json.dumps(rows, indent=2))


def _engine(path: Path, block_size: int, mode: str, swap_dir: str | None) -> Engine:
    config = EngineConfig(
        block_size=block_size,
        num_blocks_override=max(8, 4096 // block_size),
        preemption_mode=mode,  # type: ignore[arg-type]
        swap_space_bytes=256 << 20,
        swap_dir=swap_dir,
        prefix_caching=False,
    )
    checkpoint = open_checkpoint(path)
    try:
        return assemble(config, checkpoint, NativeBackend())
    finally:
        checkpoint.close()


if __name__ == "__main__":
    main()

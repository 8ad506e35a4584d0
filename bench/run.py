"""`make bench`: how fast everything is on this machine, beside what the machine can do at best.

    .venv/bin/python bench/run.py [--only micro,engine,growth,start] [--quick] [--model gemma3-270m] …

| probe  | read bandwidth and peak multiplications, of one thread and of all (first, with whatever is chosen) |
| micro  | each matrix by rows; decode attention, paged beside contiguous |
| engine | closed loops of requests, prompts, single streams |
| growth | a step's time against batch, context and pool size |
| start  | from the command to the first token, and peak memory, with the packed weights cached and not |

Writes build/bench/MODEL/SECTION.json. Figures of shared machines vary: compare only what was measured side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import growth
import micro
import serving
import startup
from limits import Machine, Peaks
from report import Row, model_name, save, show

from octavo.backends.threads import default_num_threads
from octavo.config import EngineConfig
from octavo.weights import hub
from octavo.weights.loader import open_checkpoint

SECTIONS = ("micro", "engine", "growth", "start")


def main() -> None:
    args = parse()
    threads = args.threads or default_num_threads()
    path = hub.resolve(args.model)
    config = EngineConfig(
        weight_dtype=args.weight_dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        block_size=args.block_size,
        num_threads=threads,
        kv_cache_memory_bytes=3 << 30,
        max_num_seqs=256,
        max_num_batched_tokens=args.max_num_batched_tokens,
        prefix_caching=False,
    )
    machine = Machine(threads)
    run: dict[str, Callable[[], list[Row]]] = {
        "probe": lambda: peak_rows([machine.peaks(n) for n in sorted({1, threads})]) + handover_row(machine),
        "micro": lambda: run_micro(path, config, machine, args.quick),
        "engine": lambda: run_engine(path, config, machine, args),
        "growth": lambda: run_growth(path, config, machine, args.quick),
        "start": lambda: run_start(config),
    }
    for section in ("probe", *args.only.split(",")):
        rows = run[section]()
        show(section, rows)
        save(model_name(args.model), section, vars(args), rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--quick", action="store_true", help="fewer points, about a minute in all")
    parser.add_argument("--model", default="", help="as for octavo serve")
    parser.add_argument("--concurrency", default="", help="of the closed loops, such as 1,8,32")
    parser.add_argument("--prefill", default="", help="tokens of the single prompts, such as 32,512")
    parser.add_argument("--weight-dtype", default="int8", choices=["int8", "float32", "native"])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp32", "fp16", "int8"])
    parser.add_argument("--block-size", type=int, default=EngineConfig().block_size)
    parser.add_argument("--max-num-batched-tokens", type=int, default=EngineConfig().max_num_batched_tokens)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - set(SECTIONS):
        parser.error(f"--only {','.join(sorted(unknown))}: sections are {', '.join(SECTIONS)}")
    return args


def handover_row(machine: Machine) -> list[Row]:
    if machine.threads == 1:
        return []
    return [Row("a cache line from one thread to another", machine.handover_ns(), "ns")]


def peak_rows(peaks: Sequence[Peaks]) -> list[Row]:
    return [
        Row(f"{what}, {p.threads} thread{'s' if p.threads > 1 else ''}", value, unit)
        for p in peaks
        for what, value, unit in (
            ("reading memory", p.read_gb_s, "GB/s"),
            ("int8 multiply-add", p.int8_gops, "GOP/s"),
            ("float32 multiply-add", p.float32_gflops, "GFLOP/s"),
        )
    ]


def run_micro(path: Path, config: EngineConfig, machine: Machine, is_quick: bool) -> list[Row]:
    checkpoint = open_checkpoint(path)
    model = checkpoint.config
    checkpoint.close()
    if is_quick:
        few = micro.matrices(model, config.weight_dtype, machine, (1, 32, 512))
        return few + micro.attention(model, machine, (1024,), (config.block_size,))
    return micro.matrices(model, config.weight_dtype, machine) + micro.attention(model, machine)


def run_engine(path: Path, config: EngineConfig, machine: Machine, args: argparse.Namespace) -> list[Row]:
    bench = serving.Bench(path, config, machine)
    quick = args.quick
    concurrency = numbers(args.concurrency) or [1, 8, 32, *([] if quick else [128])]
    prefills = numbers(args.prefill) or ([32, 512] if quick else [32, 64, 128, 256, 512, 1024, 2048, 4096])
    longest = bench.engine.info.max_model_len
    contexts = [n for n in ((64,) if quick else (64, 1024, 4000, 8000)) if n + 96 < longest]
    return serving.rows(bench, concurrency, prefills, contexts, per_slot=2 if quick else 4)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def run_growth(path: Path, config: EngineConfig, machine: Machine, is_quick: bool) -> list[Row]:
    # Prompts in few steps: those that are read first hardly grow while the others are.
    config = replace(config, max_num_batched_tokens=4096)
    bench = serving.Bench(path, config, machine)
    batches = [1, 4, 16, 64] if is_quick else [1, 2, 4, 8, 16, 32, 64, 128, 256]
    contexts = [128, 512] if is_quick else [64, 128, 256, 512, 1024, 2048, 4096]
    pools = [1024, 4096] if is_quick else [512, 2048, 8192, 32768]
    rows = growth.by_batch(bench, batches) + growth.by_context(bench, contexts)
    least = growth.POOL_BATCH * bench.engine.scheduler.allocator.blocks_for(
        growth.SHORT + 2 * growth.NUM_STEPS
    )
    return rows + growth.by_pool(path, config, machine, [n for n in pools if n >= least])


def run_start(config: EngineConfig) -> list[Row]:
    """Of the default model, from a process of its own: a program's peak begins with the memory of the process
    that starts it, and this one has held caches of gigabytes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(startup.measure, 3, config.weight_dtype).result()
    times = [Row(f"first token, {what}", run.first_token_s, "s") for what, run in found.items()]
    return times + [Row(f"peak memory, {what}", run.peak_mib, "MiB") for what, run in found.items()]


if __name__ == "__main__":
    main()

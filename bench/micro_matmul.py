"""Speed of the matrix kernels at SmolLM2-135M's shapes, beside what the processor can do at best.

    python bench/micro_matmul.py [--dtype int8|float32|q4|…] [--threads N] [--isa NAME] [--rounds N]

Weights are cold: each product takes the next of enough copies to fill 256 MB. Not a benchmark of the engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from octavo import _native

SHAPES = [  # name, in, out, gated
    ("qkv", 576, 960, False),
    ("o", 576, 576, False),
    ("gate_up", 576, 3072, True),
    ("down", 1536, 576, False),
    ("head", 576, 49152, False),
]
ROWS = (1, 4, 8, 32, 128, 512)
FOOTPRINT_BYTES = 256 << 20
GROUPED = (
    "q4",
    "q4_low",
    "q5",
    "q5_low",
    "q6",
    "q8",
)  # bits of a code, and whether a group has a lowest value
Packed = _native.PackedI8 | _native.PackedGrouped | _native.PackedF32


def probe(threads: int) -> dict[str, float]:
    """Peaks measured by probe.cpp, compiled for this machine."""
    source = Path(__file__).with_name("probe.cpp")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "probe")
        flags = ["-O2", "-std=c++17", "-march=native", "-pthread"]
        subprocess.run(["c++", *flags, str(source), "-o", program], check=True)
        output = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True).stdout
    peaks: dict[str, float] = json.loads(output)
    return peaks


def pack_grouped(dtype: str, k: int, n: int, is_gated: bool) -> _native.PackedGrouped:
    rng, bits, rows = np.random.default_rng(0), int(dtype[1]), n // 2 if is_gated else n
    codes = rng.integers(0, 1 << bits, (rows, k)).astype(np.uint8)  # [out, in]
    scale = rng.standard_normal((rows, k // (16 if bits == 6 else 32))).astype(np.float16)  # [out, groups]
    part = (codes, scale, scale if dtype.endswith("low") else None)
    return _native.PackedGrouped(part, part if is_gated else None, bits=bits)


def pack_one(dtype: str, k: int, n: int, is_gated: bool) -> Packed:
    if dtype in GROUPED:
        return pack_grouped(dtype, k, n, is_gated)
    weight = np.random.default_rng(0).standard_normal((n, k), np.float32)  # [out, in]
    up = weight[n // 2 :] if is_gated else None
    pack = _native.PackedI8 if dtype == "int8" else _native.PackedF32
    return pack(weight[: n // 2] if is_gated else weight, up)


def pack_copies(dtype: str, k: int, n: int, is_gated: bool) -> list[Packed]:
    first = pack_one(dtype, k, n, is_gated)
    count = max(2, FOOTPRINT_BYTES // first.nbytes)
    return [first] + [pack_one(dtype, k, n, is_gated) for _ in range(count - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["int8", "float32", *GROUPED], default="int8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", choices=_native.available_isas(), default=_native.isa())
    parser.add_argument("--rounds", type=int, default=9, help="the best of so many")
    args = parser.parse_args()

    peaks = probe(args.threads)
    peak_gops = peaks["float32_gflops" if args.dtype == "float32" else "int8_gops"]
    peak_gb_s = peaks["read_gb_s"]
    print(
        f"{args.isa}, {args.threads} threads, {args.dtype}: at best {peak_gops:.0f} GOP/s, {peak_gb_s:.1f} GB/s"
    )
    print(f"{'matrix':>8} {'rows':>5} {'us':>9} {'GOP/s':>7} {'share':>6} {'GB/s':>6} {'share':>6}")
    pool = _native.thread_pool(args.threads)
    for name, k, n, is_gated in SHAPES:
        matrices = pack_copies(args.dtype, k, n, is_gated)
        for rows in ROWS:
            if name == "head" and rows > 32:
                continue  # only rows that are sampled need logits
            used = matrices[: max(2, 4096 // rows)]
            seconds = _native.time_matmul(used, rows, pool, args.rounds, args.isa)
            gops, gb_s = 2 * rows * n * k / seconds / 1e9, matrices[0].nbytes / seconds / 1e9
            print(
                f"{name:>8} {rows:>5} {seconds * 1e6:>9.1f} {gops:>7.0f} {gops / peak_gops:>6.0%} "
                f"{gb_s:>6.1f} {gb_s / peak_gb_s:>6.0%}"
            )


if __name__ == "__main__":
    main()

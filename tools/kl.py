"""How much rounding changes the model's predictions: KL(exact ‖ rounded) in nats a token.

    python tools/kl.py [--model NAME] [--backend native] [--text story,talk] [--limit 0.012]
                       [--weight-dtype int8] [--kv-cache-dtype auto]

Both modes read the texts of tests/golden/eval_text.txt.gz through the same backend and the paged cache. The
exact mode has float32 weights, keys and values; the rounded one has int8 weights and the cache that the engine
pairs them with, unless the options say otherwise. For each text it prints the mean KL, how often both modes
agree on the most likely token, and the perplexity of each. It exits with 1 when the mean over all tokens is
above the limit.
"""

from __future__ import annotations

import argparse
import gzip
import math
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from octavo.backends.ops import (
    F32,
    I32,
    Backend,
    KVCacheConfig,
    KVDtype,
    Limits,
    Runner,
    StepInputs,
    WeightDtype,
)
from octavo.config import DEFAULT_MODEL, EngineConfig
from octavo.core.kv_groups import group_layers
from octavo.engine.memory import resolve_kv_dtype
from octavo.models.registry import build_model
from octavo.weights import hub
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.loader import open_checkpoint

TEXTS = Path(__file__).parents[1] / "tests" / "golden" / "eval_text.txt.gz"
CHUNK = 128  # tokens a step, and logit rows at a time
BLOCK_SIZE = 16
KVChoice = KVDtype | Literal["auto"]
Mode = tuple[WeightDtype, KVChoice]
EXACT: Mode = ("float32", "fp32")
ROUNDED: Mode = ("int8", "auto")


@dataclass(frozen=True, slots=True)
class Score:
    """Sums over the positions of a text whose next token is known."""

    num_tokens: int = 0
    kl: float = 0.0  # nats
    num_agreed: int = 0
    nll_exact: float = 0.0  # nats
    nll_rounded: float = 0.0  # nats

    def __add__(self, other: Score) -> Score:
        return Score(
            self.num_tokens + other.num_tokens,
            self.kl + other.kl,
            self.num_agreed + other.num_agreed,
            self.nll_exact + other.nll_exact,
            self.nll_rounded + other.nll_rounded,
        )

    @property
    def mean_kl(self) -> float:
        return self.kl / self.num_tokens

    def line(self, name: str) -> str:
        exact, rounded = (math.exp(nll / self.num_tokens) for nll in (self.nll_exact, self.nll_rounded))
        agreed = self.num_agreed / self.num_tokens
        return (
            f"{name:12} {self.num_tokens:6} {self.mean_kl:9.5f} {agreed:9.2%} {exact:10.3f} {rounded:11.3f}"
        )


def read_texts() -> dict[str, str]:
    """The evaluation texts by name; a line `=== name` begins each."""
    sections = re.split(r"^=== ", gzip.decompress(TEXTS.read_bytes()).decode(), flags=re.MULTILINE)[1:]
    return {name: body.strip() for name, body in (section.split("\n", 1) for section in sections)}


@dataclass(frozen=True, slots=True)
class Reader:
    """A compiled mode and the blocks of its one sequence."""

    runner: Runner
    tables: tuple[I32, ...]  # [1, blocks] for each group of layers


def compile_mode(
    checkpoint: Checkpoint, backend: Backend, weight_dtype: WeightDtype, kv_choice: KVChoice, max_len: int
) -> Reader:
    model = build_model(checkpoint.config, checkpoint, backend, weight_dtype)
    num_blocks = -(-max_len // BLOCK_SIZE)
    layout = group_layers(model.kv_specs())
    kv_dtype = resolve_kv_dtype(EngineConfig(weight_dtype=weight_dtype, kv_cache_dtype=kv_choice), layout)
    ids = np.arange(len(layout.groups) * num_blocks, dtype=np.int32).reshape(-1, 1, num_blocks)
    cache = KVCacheConfig(layout, ids.size, BLOCK_SIZE, kv_dtype)
    return Reader(backend.compile(model, cache, Limits(CHUNK, 1, 1, num_blocks, CHUNK)), tuple(ids))


def chunk_logits(reader: Reader, tokens: I32, start: int) -> F32:
    """Logits [n, V] of the chunk at `start`; everything before it is already in the cache."""
    part = tokens[start : start + CHUNK]  # [n]
    rows = np.arange(len(part), dtype=np.int32)
    inputs = StepInputs(
        tokens=part,
        positions=rows + np.int32(start),
        query_starts=np.array([0, len(part)], np.int32),
        seq_lens=np.array([start + len(part)], np.int32),
        table_rows=np.zeros(1, np.int32),
        block_tables=reader.tables,
    )
    reader.runner.forward(inputs)
    return reader.runner.logits(rows)


def log_softmax(logits: F32) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def compare(exact_logits: F32, rounded_logits: F32, targets: I32) -> Score:
    """`targets` [n] are the tokens that really follow; rows beyond them are left out."""
    n = len(targets)
    p, q = log_softmax(exact_logits[:n]), log_softmax(rounded_logits[:n])  # [n, V]
    rows = np.arange(n)
    return Score(
        num_tokens=n,
        kl=float((np.exp(p) * (p - q)).sum()),
        num_agreed=int((p.argmax(-1) == q.argmax(-1)).sum()),
        nll_exact=float(-p[rows, targets].sum()),
        nll_rounded=float(-q[rows, targets].sum()),
    )


def score_text(readers: tuple[Reader, Reader], tokens: I32) -> Score:
    score = Score()
    for start in range(0, len(tokens), CHUNK):
        exact, rounded = (chunk_logits(reader, tokens, start) for reader in readers)
        score = score + compare(exact, rounded, tokens[start + 1 : start + 1 + CHUNK])
    return score


def make_backend(name: str) -> Backend:
    if name == "numpy":
        from octavo.backends.numpy_ref import NumpyBackend

        return NumpyBackend()
    from octavo.backends.native import NativeBackend

    return NativeBackend()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--backend", choices=["native", "numpy"], default="native")
    parser.add_argument("--text", help="names of the texts, separated by commas (default: all)")
    parser.add_argument("--limit", type=float, default=0.012, help="highest mean KL allowed, nats a token")
    parser.add_argument("--weight-dtype", choices=get_args(WeightDtype), default=ROUNDED[0])
    parser.add_argument("--kv-cache-dtype", choices=["auto", *get_args(KVDtype)], default=ROUNDED[1])
    args = parser.parse_args()
    texts = read_texts()
    args.names = args.text.split(",") if args.text else list(texts)
    if unknown := set(args.names) - set(texts):
        parser.error(f"no text is called {', '.join(sorted(unknown))}; there are {', '.join(texts)}")
    return args


def main() -> int:
    args = arguments()
    texts = read_texts()
    checkpoint = open_checkpoint(hub.resolve(args.model))
    tokenizer = checkpoint.tokenizer()
    tokens = {name: np.array(tokenizer.encode(texts[name]), np.int32) for name in args.names}
    max_len = max(len(ids) for ids in tokens.values())
    backend = make_backend(args.backend)
    modes: tuple[Mode, Mode] = EXACT, (args.weight_dtype, args.kv_cache_dtype)
    exact, rounded = (compile_mode(checkpoint, backend, *mode, max_len) for mode in modes)
    print(f"{'text':12} {'tokens':>6} {'KL':>9} {'agreement':>9} {'ppl exact':>10} {'ppl rounded':>11}")
    total, begin = Score(), time.perf_counter()
    for name in args.names:
        score = score_text((exact, rounded), tokens[name])
        print(score.line(name), flush=True)
        total = total + score
    print(total.line("all"))
    print(f"{time.perf_counter() - begin:.1f} s, limit {args.limit}")
    return 0 if total.mean_kl <= args.limit else 1


if __name__ == "__main__":
    sys.exit(main())

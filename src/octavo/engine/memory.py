"""plan_memory: how many blocks the pool gets, decided once before anything is allocated, and said in words.

The default is a quarter of the memory that is free once the weights are loaded, but never more than
max_num_seqs sequences of full length could fill.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from octavo.backends.ops import KVDtype
from octavo.config import EngineConfig
from octavo.core.kv_groups import KVLayout
from octavo.core.kv_spec import KV_FORMATS, FullAttentionSpec, SlidingWindowSpec
from octavo.errors import ConfigError

FREE_SHARE = 0.25  # of available memory, when --kv-cache-memory is not given
# Numbers of a head, which share a scale: up to so many, int8 costs less than 0.001 nats a token (tools/kl.py).
INT8_HEAD = 64
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_blocks: int
    block_size: int  # tokens
    block_bytes: int  # over all storage arrays
    kv_dtype: KVDtype
    max_model_len: int
    weight_bytes: int
    sequence_blocks: int  # most that a sequence of max_model_len tokens holds, over all groups of layers
    max_request_tokens: int  # the longest sequence whose blocks fit the pool

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """What it holds in sequences of full length. Short ones gain less from windows and states."""
        return self.num_blocks * self.max_model_len // self.sequence_blocks

    @property
    def num_full_requests(self) -> float:
        return self.num_blocks / self.sequence_blocks

    def report(self) -> list[str]:
        """One line each, for the log at start."""
        lines = [
            f"weights {self.weight_bytes / MIB:,.0f} MiB, KV cache {self.num_blocks:,} blocks of "
            f"{self.block_size} = {self.num_tokens:,} tokens, {self.kv_bytes / MIB:,.0f} MiB of "
            f"{self.kv_dtype}",
            f"{self.num_full_requests:,.1f} requests of the full {self.max_model_len:,} tokens fit at once",
        ]
        if self.max_request_tokens < self.max_model_len:
            lines.append(
                f"the pool is smaller than the model's context: a request can use at most "
                f"{self.max_request_tokens:,} tokens (--kv-cache-memory gives it more)"
            )
        return lines


def resolve_kv_dtype(config: EngineConfig, layout: KVLayout) -> KVDtype:
    """What was asked for; auto is fp32 beside exact weights, int8 where that is close, fp16 elsewhere."""
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    if config.weight_dtype == "float32":
        return "fp32"
    keyed = FullAttentionSpec | SlidingWindowSpec
    heads = (group.spec.head_size for group in layout.groups if isinstance(group.spec, keyed))
    return "int8" if max(heads, default=0) <= INT8_HEAD else "fp16"


def resolve_max_model_len(config: EngineConfig, trained: int) -> int:
    """The context length served; longer than trained is refused, as positions beyond it are undefined."""
    if config.max_model_len is None:
        return trained
    if not 2 <= config.max_model_len <= trained:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} must lie between 2 and {trained}, which the model was "
            f"trained for"
        )
    return config.max_model_len


def plan_memory(config: EngineConfig, layout: KVLayout, max_model_len: int, weight_bytes: int) -> MemoryPlan:
    """Size the pool. Raises ConfigError when not even one block fits."""
    kv_dtype = resolve_kv_dtype(config, layout)
    block_bytes = layout.bytes_per_block(config.block_size, KV_FORMATS[kv_dtype])

    def blocks_for(num_tokens: int) -> int:
        return layout.max_blocks(num_tokens, config.max_num_batched_tokens, config.block_size)

    per_sequence = blocks_for(max_model_len)
    num_blocks = _num_blocks(config, block_bytes, per_sequence * config.max_num_seqs)
    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=config.block_size,
        block_bytes=block_bytes,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        weight_bytes=weight_bytes,
        sequence_blocks=per_sequence,
        max_request_tokens=bisect_right(range(max_model_len + 1), num_blocks, key=blocks_for) - 1,
    )


def plan_swap_blocks(config: EngineConfig, plan: MemoryPlan) -> int:
    """How many blocks the swap space holds, before the pool has been filled. Raises ConfigError."""
    wanted = config.swap_space_bytes
    if 0 < wanted < plan.block_bytes:
        raise ConfigError(
            f"--swap-space of {wanted:,} bytes holds no block: one block of {plan.block_size} tokens takes "
            f"{plan.block_bytes:,} bytes"
        )
    left = max(0, available_memory_bytes() - plan.kv_bytes) if wanted and config.swap_dir is None else wanted
    if wanted > left:
        raise ConfigError(
            f"--swap-space asks for {wanted / MIB:,.0f} MiB and the KV cache leaves {left / MIB:,.0f} MiB: "
            f"ask for less, or give --swap-dir"
        )
    return wanted // plan.block_bytes


def _num_blocks(config: EngineConfig, block_bytes: int, useful: int) -> int:
    available = available_memory_bytes()
    if config.num_blocks_override is not None:
        if config.num_blocks_override * block_bytes > available:
            raise ConfigError(
                f"--num-blocks-override {config.num_blocks_override} takes "
                f"{config.num_blocks_override * block_bytes / MIB:,.0f} MiB and {available / MIB:,.0f} MiB are "
                f"free: ask for fewer"
            )
        return config.num_blocks_override
    wanted = config.kv_cache_memory_bytes
    if wanted is None:
        return max(1, min(useful, int(available * FREE_SHARE) // block_bytes))
    if wanted > available:
        raise ConfigError(
            f"--kv-cache-memory asks for {wanted / MIB:,.0f} MiB and {available / MIB:,.0f} MiB are free: "
            f"ask for less"
        )
    if wanted < block_bytes:
        raise ConfigError(
            f"--kv-cache-memory of {wanted:,} bytes holds no block: one block of {config.block_size} tokens "
            f"takes {block_bytes:,} bytes"
        )
    return wanted // block_bytes


def available_memory_bytes() -> int:
    """Memory this process may still take: what the system has free, within the control group's limit."""
    available = _meminfo_available()
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is not None and usage is not None:
            available = min(available, max(0, limit - usage))
    return available


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import os

    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _read_int(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None

"""check_config: what is wrong with an EngineConfig whatever the model is.

Apart from build.py, which needs all of the engine: a server asks here before it starts one in another process.
"""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.errors import ConfigError


def check_config(config: EngineConfig) -> None:
    """Raise ConfigError for what cannot work whatever the model is."""
    for flag, value in (
        ("--block-size", config.block_size),
        ("--max-num-seqs", config.max_num_seqs),
        ("--max-num-batched-tokens", config.max_num_batched_tokens),
        ("--num-blocks-override", config.num_blocks_override),
        ("--kv-cache-memory", config.kv_cache_memory_bytes),
        ("--threads", config.num_threads),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}")
    if config.swap_space_bytes < 0:
        raise ConfigError(f"--swap-space must not be negative, got {config.swap_space_bytes}")
    if config.preemption_mode == "swap" and not config.swap_space_bytes:
        raise ConfigError("--preemption-mode swap needs room: give --swap-space a size, such as 1GiB")
    if config.swap_dir is not None and not config.swap_space_bytes:
        raise ConfigError("--swap-dir needs a size: give --swap-space, such as 4GiB")
    if config.block_size > 256:
        raise ConfigError(f"--block-size must be at most 256 tokens, got {config.block_size}")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is less than --max-num-seqs "
            f"{config.max_num_seqs}: every running sequence needs one token a step"
        )

"""`octavo serve`: flags to EngineConfig and ServeOptions. Every parameter is a flag, so there are many."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli import options
from octavo.config import DEFAULT_MODEL, EngineConfig

_DEFAULTS = EngineConfig()
_SERVER = "Server"


def serve(
    model: options.ModelArgument = DEFAULT_MODEL,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is all.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 is any free one.", rich_help_panel=_SERVER)
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name that clients use for the model; may be given several times.", rich_help_panel=_SERVER
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OCTAVO_API_KEY",
            help="Key that clients must send; /health needs none.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    block_size: options.BlockSize = _DEFAULTS.block_size,
    kv_cache_memory: options.KVCacheMemory = None,
    num_blocks_override: options.NumBlocksOverride = None,
    weight_dtype: options.WeightDtypeOption = options.WeightDtype.AUTO,
    weight_cache: options.WeightCache = _DEFAULTS.weight_cache,
    kv_cache_dtype: options.KVCacheDtypeOption = options.KVCacheDtype.AUTO,
    enable_prefix_caching: options.PrefixCaching = _DEFAULTS.prefix_caching,
    preemption_mode: options.PreemptionModeOption = options.PreemptionMode.AUTO,
    swap_space: options.SwapSpace = "0",
    swap_dir: options.SwapDir = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: options.MaxNumBatchedTokens = _DEFAULTS.max_num_batched_tokens,
    threads: options.Threads = None,
    seed: options.Seed = _DEFAULTS.seed,
    debug: options.Debug = False,
) -> None:
    """Serve a model over the OpenAI API, until Ctrl-C."""
    config = EngineConfig(
        model=model or DEFAULT_MODEL,
        block_size=block_size,
        kv_cache_memory_bytes=None if kv_cache_memory is None else options.parse_size(kv_cache_memory),
        num_blocks_override=num_blocks_override,
        weight_dtype=weight_dtype.value,
        weight_cache=weight_cache,
        kv_cache_dtype=kv_cache_dtype.value,
        prefix_caching=enable_prefix_caching,
        preemption_mode=preemption_mode.value,
        swap_space_bytes=options.parse_swap_space(swap_space),
        swap_dir=swap_dir,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_threads=threads,
        seed=seed,
        debug=debug,
    )
    from octavo.server.serve import ServeOptions
    from octavo.server.serve import serve as run_server

    run_server(config, ServeOptions(host, port, api_key or None, tuple(served_model_name or ())))

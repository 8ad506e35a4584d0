"""build_engine: from an EngineConfig to an Engine that can step. The one place that knows how parts fit.

name ─hub▶ file ─weights▶ checkpoint ─models▶ model ─backend▶ runner ┐
                                config ─memory▶ plan ─▶ KVCacheManager ┴▶ Scheduler + Executor = Engine
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from octavo.backends.ops import Backend, KVCacheConfig, Limits, RestoresParameters, WeightDtype
from octavo.config import EngineConfig
from octavo.core.kv_groups import group_layers
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_swap import SwapSpace
from octavo.engine.check_config import check_config
from octavo.engine.engine import Engine
from octavo.engine.executor import Executor
from octavo.engine.memory import MemoryPlan, plan_memory, plan_swap_blocks, resolve_max_model_len
from octavo.engine.messages import Ready
from octavo.engine.swap_store import make_store
from octavo.engine.weight_choice import choose_weights
from octavo.models.registry import build_model
from octavo.sampling.sampler import Sampler
from octavo.sched.budget import SchedulerConfig
from octavo.sched.scheduler import Scheduler
from octavo.text.tokenizer import Tokenizer
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.loader import open_checkpoint
from octavo.weights.packed_cache import MIN_MODEL_BYTES, PackedCache, identity_of

PROBE_BLOCKS = 8  # blocks moved at start to learn what swapping costs
MAX_LOGIT_ROWS = 64  # rows of logits alive at once; a larger batch is sampled in parts

Progress = Callable[[int, int], None]  # (parts done, parts in all)


def make_backend(config: EngineConfig) -> Backend:
    if config.backend == "numpy":
        from octavo.backends.numpy_ref import NumpyBackend

        return NumpyBackend()
    from octavo.backends.native import NativeBackend

    return NativeBackend(num_threads=config.num_threads)


def build_engine(config: EngineConfig, model_path: Path, progress: Progress | None = None) -> Engine:
    """Load the model at `model_path` and plan its memory.

    Raises ConfigError or ModelError.
    """
    check_config(config)
    checkpoint = open_checkpoint(model_path)
    try:
        return assemble(config, checkpoint, make_backend(config), progress)
    finally:
        checkpoint.close()


def assemble(
    config: EngineConfig, checkpoint: Checkpoint, backend: Backend, progress: Progress | None = None
) -> Engine:
    """The same from an open checkpoint and a backend of the caller's choice."""
    max_model_len = resolve_max_model_len(config, checkpoint.config.max_position)
    weight_dtype, why = choose_weights(config, checkpoint)
    kept = _open_cache(config, weight_dtype, checkpoint, backend)
    model = build_model(checkpoint.config, checkpoint, backend, weight_dtype, progress, kept)
    if kept is not None:
        kept.finish()
    layout = group_layers(model.kv_specs())
    plan = plan_memory(config, layout, max_model_len, backend.num_weight_bytes)
    limits = _limits(config, max_model_len)
    runner = backend.compile(
        model, KVCacheConfig(layout, plan.num_blocks, plan.block_size, plan.kv_dtype), limits
    )
    manager = KVCacheManager(
        layout,
        plan.num_blocks,
        plan.block_size,
        max_chunk=config.max_num_batched_tokens,
        prefix_caching=config.prefix_caching,
    )
    num_swap_blocks = plan_swap_blocks(config, plan)
    scheduler = Scheduler(
        SchedulerConfig(
            config.max_num_batched_tokens, config.max_num_seqs, max_model_len, config.preemption_mode
        ),
        manager,
        plan.block_size,
        SwapSpace(manager, num_swap_blocks),
    )
    vocab_size, path = checkpoint.config.vocab_size, checkpoint.path  # of the checkpoint nothing else is kept
    executor = Executor(
        runner,
        Sampler(vocab_size, runner.softmax_blocks, config.seed),
        limits,
        len(layout.groups),
        make_store(config.swap_dir, num_swap_blocks, plan.block_bytes),
    )
    executor.measure_swap(min(PROBE_BLOCKS, num_swap_blocks, plan.num_blocks))
    return Engine(
        scheduler,
        executor,
        _info(plan, vocab_size, backend, num_swap_blocks, why),
        frozenset(checkpoint.config.eos_token_ids),
        make_tokenizer=lambda: tokenizer_of(path),
        max_logprobs=config.max_logprobs,
        debug=config.debug,
    )


def _open_cache(
    config: EngineConfig, weight_dtype: WeightDtype, checkpoint: Checkpoint, backend: Backend
) -> PackedCache | None:
    if not config.weight_cache or not isinstance(backend, RestoresParameters):
        return None
    if checkpoint.num_bytes < MIN_MODEL_BYTES:
        return None
    code = backend.code_files()
    return PackedCache(identity_of(checkpoint.path, checkpoint.files, weight_dtype, code), backend.restore)


def tokenizer_of(path: Path) -> Tokenizer:
    """Of a model whose checkpoint has been closed; only beam search with stop strings needs it here."""
    checkpoint = open_checkpoint(path)
    try:
        return checkpoint.tokenizer()
    finally:
        checkpoint.close()


def _limits(config: EngineConfig, max_model_len: int) -> Limits:
    return Limits(
        max_tokens=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs,
        max_table_rows=config.max_num_seqs,
        max_blocks_per_seq=-(-max_model_len // config.block_size),
        max_logit_rows=min(MAX_LOGIT_ROWS, config.max_num_batched_tokens),
    )


def _info(plan: MemoryPlan, vocab_size: int, backend: Backend, num_swap_blocks: int, weights: str) -> Ready:
    report = [*plan.report(), weights]
    if num_swap_blocks:
        report.append(f"swap space of {num_swap_blocks:,} blocks")
    return Ready(
        max_model_len=plan.max_model_len,
        vocab_size=vocab_size,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        report=[*report, f"computing with {backend.description}"],
    )

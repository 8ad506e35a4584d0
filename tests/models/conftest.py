"""run_paged: a model over one sequence whose blocks come and go as in the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from octavo.backends.ops import F32, Backend, KVCacheConfig, KVDtype, Limits, StepInputs
from octavo.core.block import SeqId
from octavo.core.kv_groups import group_layers
from octavo.core.kv_manager import KVCacheManager
from octavo.models.decoder import Decoder

SEQ = SeqId(0)


@pytest.fixture(scope="session")
def run_paged() -> Callable[..., F32]:
    """run_paged(backend, model, tokens, rows, chunk=…, …) → logits [R, V] after the tokens at positions `rows`.

    The pool has exactly as many blocks as the layout promises that one sequence needs, so blocks of a window
    return to it and are reused, and every block that is handed out is full of NaN.
    """

    def run(
        backend: Backend,
        model: Decoder,
        tokens: Sequence[int],
        rows: Sequence[int],
        *,
        chunk: int,
        block_size: int = 16,
        kv_dtype: KVDtype = "fp32",
    ) -> F32:
        layout = group_layers(model.kv_specs())
        num_blocks = layout.max_blocks(len(tokens), chunk, block_size)
        manager = KVCacheManager(layout, num_blocks, block_size, max_chunk=chunk, prefix_caching=False)
        width = -(-len(tokens) // block_size)
        cache = KVCacheConfig(layout, num_blocks, block_size, kv_dtype)
        runner = backend.compile(model, cache, Limits(chunk, 1, 1, width, len(rows)))
        tables = tuple(np.zeros((1, width), np.int32) for _ in layout.groups)
        manager.admit(SEQ)
        found = []
        for start in range(0, len(tokens), chunk):
            end = min(start + chunk, len(tokens))
            growth = manager.grow(SEQ, end)
            assert growth is not None, f"{num_blocks} blocks do not last for {end} tokens"
            for write in growth.table_writes:
                tables[write.group][0, write.first : write.first + len(write.block_ids)] = write.block_ids
                for block_id in write.block_ids:
                    runner.fill_block(block_id, float("nan"))
            runner.forward(
                StepInputs(
                    tokens=np.asarray(tokens[start:end], np.int32),
                    positions=np.arange(start, end, dtype=np.int32),
                    query_starts=np.array([0, end - start], np.int32),
                    seq_lens=np.array([end], np.int32),
                    table_rows=np.zeros(1, np.int32),
                    block_tables=tables,
                )
            )
            wanted = np.array([row - start for row in rows if start <= row < end], np.int32)
            if len(wanted):
                found.append(runner.logits(wanted).copy())
        return np.concatenate(found)

    return run

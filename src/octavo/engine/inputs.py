"""InputBuilder: turns a StepPlan into the integer arrays a runner takes.

Updated by what changed, not rebuilt.

It owns the executor's copy of the block tables: one row per sequence, written only where the plan says so.
All arrays are allocated once.
"""

from __future__ import annotations

import numpy as np

from octavo.backends.ops import I32, Limits, StepInputs
from octavo.core.block import SeqId
from octavo.core.step import SequenceSlice, StepPlan


class InputBuilder:
    """`build(plan)` returns views that are valid until the next call."""

    def __init__(self, limits: Limits, num_groups: int) -> None:
        self._tables = tuple(
            np.zeros((limits.max_table_rows, limits.max_blocks_per_seq), np.int32)  # [rows, max_blocks]
            for _ in range(num_groups)
        )
        self._free_rows = list(range(limits.max_table_rows - 1, -1, -1))
        self._rows: dict[SeqId, int] = {}
        self._tokens = np.zeros(limits.max_tokens, np.int32)  # [T]
        self._positions = np.zeros(limits.max_tokens, np.int32)  # [T]
        self._query_starts = np.zeros(limits.max_seqs + 1, np.int32)  # [S+1]
        self._seq_lens = np.zeros(limits.max_seqs, np.int32)  # [S]
        self._table_rows = np.zeros(limits.max_seqs, np.int32)  # [S]

    def forget(self, seq_id: SeqId) -> None:
        """The sequence ended or lost its blocks: its row may be reused."""
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free_rows.append(row)

    def build(self, plan: StepPlan) -> StepInputs:
        tokens: list[int] = []
        positions: list[int] = []
        starts, lens, rows = [0], [], []
        for piece in plan.slices:
            tokens += piece.token_ids
            positions += range(piece.start, piece.end)
            starts.append(len(tokens))
            lens.append(piece.end)
            rows.append(self._write_table(piece))
        num_seqs, num_tokens = len(lens), len(tokens)
        return StepInputs(
            tokens=_fill(self._tokens, tokens, num_tokens),
            positions=_fill(self._positions, positions, num_tokens),
            query_starts=_fill(self._query_starts, starts, num_seqs + 1),
            seq_lens=_fill(self._seq_lens, lens, num_seqs),
            table_rows=_fill(self._table_rows, rows, num_seqs),
            block_tables=self._tables,
        )

    def _write_table(self, piece: SequenceSlice) -> int:
        row = self._rows.get(piece.seq_id)
        if row is None:
            row = self._rows[piece.seq_id] = self._free_rows.pop()
        for write in piece.table_writes:
            self._tables[write.group][row, write.index : write.index + len(write.block_ids)] = write.block_ids
        return row


def _fill(array: I32, values: list[int], count: int) -> I32:
    view = array[:count]
    view[:] = values
    return view

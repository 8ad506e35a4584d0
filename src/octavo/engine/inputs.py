"""InputBuilder: turns a StepPlan into the integer arrays a runner takes.

Updated by what changed, not rebuilt.

It owns the executor's copy of the block tables: one row per sequence, written only where the plan says so.
All arrays are allocated once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.backends.ops import I32, Limits, StepInputs
from octavo.core.block import SeqId
from octavo.core.step import StepPlan


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
        self._counting = np.arange(limits.max_tokens + 1, dtype=np.int32)  # [T+1]
        self._positions = np.zeros(limits.max_tokens, np.int32)  # [T]
        self._query_starts = np.zeros(limits.max_seqs + 1, np.int32)  # [S+1]
        self._seq_lens = np.zeros(limits.max_seqs, np.int32)  # [S]
        self._table_rows = np.zeros(limits.max_seqs, np.int32)  # [S]

    def forget(self, seq_id: SeqId) -> None:
        """The sequence ended or lost its blocks: its row may be reused."""
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free_rows.append(row)

    def build(self, plan: StepPlan) -> tuple[StepInputs, I32]:
        """The inputs, and the row that each of plan.drawing draws from. Column by column: nothing here loops over
        sequences in Python."""
        for seq_id, group, first, block_ids in plan.table_writes:
            row = self._rows.get(seq_id)
            if row is None:  # a sequence that has no row yet comes with its whole table
                row = self._rows[seq_id] = self._free_rows.pop()
            self._tables[group][row, first : first + len(block_ids)] = block_ids
        table_rows = _fill(self._table_rows, list(map(self._rows.__getitem__, plan.seq_ids)))
        tokens, seq_lens = _fill(self._tokens, plan.token_ids), _fill(self._seq_lens, plan.ends)
        positions, num_seqs = self._positions[: len(tokens)], len(seq_lens)
        if len(tokens) == num_seqs:  # one a sequence
            query_starts, last_rows = self._counting[: num_seqs + 1], self._counting[:num_seqs]
            np.subtract(seq_lens, 1, out=positions)
        else:
            query_starts = self._query_starts[: num_seqs + 1]
            lengths = np.array(plan.lengths, np.int32)  # [S]
            np.cumsum(lengths, out=query_starts[1:])
            before = seq_lens - query_starts[1:]  # [S] positions less rows
            np.add(np.repeat(before, lengths), self._counting[: len(tokens)], out=positions)
            last_rows = query_starts[1:] - 1  # [S]
        if len(plan.drawing) == num_seqs and 0 not in plan.num_draws:  # one draw a sequence
            drawn_rows = last_rows
        else:
            drawn_rows = np.repeat(last_rows, plan.num_draws)
        inputs = StepInputs(tokens, positions, query_starts, seq_lens, table_rows, self._tables)
        return inputs, drawn_rows


def _fill(array: I32, values: Sequence[int]) -> I32:
    view = array[: len(values)]
    view[:] = values
    return view

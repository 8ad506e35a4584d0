"""The integer arrays of a step: exact values, tables written only where the plan says so, rows reused."""

from __future__ import annotations

from octavo.backends.ops import Limits, StepInputs
from octavo.core.step import SequenceSlice, StepPlan, TableWrite
from octavo.engine.inputs import InputBuilder


def lists(inputs: StepInputs) -> list[list[int]]:
    return [
        a.tolist()
        for a in (
            inputs.tokens,
            inputs.positions,
            inputs.query_starts,
            inputs.seq_lens,
            inputs.table_rows,
        )
    ]


def test_arrays_of_chunks_and_single_tokens():
    builder = InputBuilder(Limits(16, 4, 4, 3, 4), num_groups=2)
    first = SequenceSlice(7, 0, (10, 11, 12), (TableWrite(0, 0, (5, 6)), TableWrite(1, 1, (4,))), ())
    second = SequenceSlice(8, 4, (20,), (TableWrite(0, 0, (1, 2, 3)),), (8,))
    inputs = builder.build(StepPlan(1, (first, second)))
    assert lists(inputs) == [[10, 11, 12, 20], [0, 1, 2, 4], [0, 3, 4], [3, 5], [0, 1]]
    assert [t[:2].tolist() for t in inputs.block_tables] == [[[5, 6, 0], [1, 2, 3]], [[0, 4, 0], [0, 0, 0]]]

    one = SequenceSlice(8, 5, (21,), (), (8,))
    two = SequenceSlice(7, 3, (13, 14), (TableWrite(0, 2, (9,)),), (7,))
    inputs = builder.build(StepPlan(2, (one, two)))
    assert lists(inputs) == [[21, 13, 14], [5, 3, 4], [0, 1, 3], [6, 5], [1, 0]]
    assert inputs.block_tables[0][:2].tolist() == [[5, 6, 9], [1, 2, 3]]


def test_the_row_of_a_forgotten_sequence_is_used_again():
    builder = InputBuilder(Limits(16, 4, 1, 3, 4), num_groups=1)
    builder.build(StepPlan(1, (SequenceSlice(1, 0, (3,), (TableWrite(0, 0, (2,)),)),)))
    builder.forget(1)
    inputs = builder.build(StepPlan(2, (SequenceSlice(2, 0, (4,), (TableWrite(0, 0, (6,)),)),)))
    assert inputs.table_rows.tolist() == [0]
    assert inputs.block_tables[0].tolist() == [[6, 0, 0]]

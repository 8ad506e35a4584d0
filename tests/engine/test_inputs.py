"""The integer arrays of a step: exact values, tables written only where the plan says so, rows reused."""

from __future__ import annotations

from itertools import chain

import pytest

from octavo.backends.ops import Limits, StepInputs
from octavo.core.step import StepPlan, TableWrite
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


def plan(
    step: int,
    *slices: tuple[int, int, list[int]],
    draws: tuple[int, ...] = (),
    writes: tuple[TableWrite, ...] = (),
) -> StepPlan:
    """Of slices (sequence, end, tokens), each of which draws one token or as many as `draws` says."""
    seq_ids, ends, token_ids = zip(*slices, strict=True)
    num_draws = draws or (1,) * len(slices)
    return StepPlan(
        step,
        seq_ids,
        ends,
        lengths=tuple(map(len, token_ids)),
        token_ids=tuple(chain(*token_ids)),
        drawing=tuple(range(100, 100 + sum(num_draws))),
        num_draws=num_draws,
        table_writes=writes,
    )


def test_arrays_of_chunks_and_single_tokens():
    builder = InputBuilder(Limits(16, 4, 4, 3, 4), num_groups=2)
    writes = (TableWrite(7, 0, 0, (5, 6)), TableWrite(7, 1, 1, (4,)), TableWrite(8, 0, 0, (1, 2, 3)))
    inputs, rows = builder.build(plan(1, (7, 3, [10, 11, 12]), (8, 5, [20]), writes=writes))
    assert rows.tolist() == [2, 3]
    assert lists(inputs) == [[10, 11, 12, 20], [0, 1, 2, 4], [0, 3, 4], [3, 5], [0, 1]]
    assert [t[:2].tolist() for t in inputs.block_tables] == [[[5, 6, 0], [1, 2, 3]], [[0, 4, 0], [0, 0, 0]]]

    inputs, rows = builder.build(plan(2, (8, 6, [21]), (7, 5, [13, 14]), writes=(TableWrite(7, 0, 2, (9,)),)))
    assert rows.tolist() == [0, 2]
    assert lists(inputs) == [[21, 13, 14], [5, 3, 4], [0, 1, 3], [6, 5], [1, 0]]
    assert inputs.block_tables[0][:2].tolist() == [[5, 6, 9], [1, 2, 3]]


def test_the_row_of_a_forgotten_sequence_is_used_again():
    builder = InputBuilder(Limits(16, 4, 1, 3, 4), num_groups=1)
    builder.build(plan(1, (1, 1, [3]), writes=(TableWrite(1, 0, 0, (2,)),)))
    builder.forget(1)
    inputs, _ = builder.build(plan(2, (2, 1, [4]), writes=(TableWrite(2, 0, 0, (6,)),)))
    assert inputs.table_rows.tolist() == [0]
    assert inputs.block_tables[0].tolist() == [[6, 0, 0]]


def test_a_full_step_of_single_tokens():
    builder = InputBuilder(Limits(3, 3, 3, 4, 4), num_groups=1)
    writes = tuple(TableWrite(seq_id, 0, 0, (seq_id,)) for seq_id in (1, 2, 3))
    inputs, rows = builder.build(plan(1, (1, 4, [10]), (2, 1, [20]), (3, 7, [30]), writes=writes))
    assert lists(inputs) == [[10, 20, 30], [3, 0, 6], [0, 1, 2, 3], [4, 1, 7], [0, 1, 2]]
    assert rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("draws", "rows"),
    [((0, 1, 2), [3, 5, 5]), ((0, 0, 0), []), ((3, 0, 0), [2, 2, 2]), ((1, 1, 1), [2, 3, 5])],
)
def test_choices_draw_from_the_last_row_of_their_slice(draws, rows):
    builder = InputBuilder(Limits(16, 3, 3, 4, 4), num_groups=1)
    writes = tuple(TableWrite(seq_id, 0, 0, (seq_id,)) for seq_id in (1, 2, 3))
    slices = [(1, 3, [7, 8, 9]), (2, 5, [4]), (3, 2, [5, 6])]
    assert builder.build(plan(1, *slices, draws=draws, writes=writes))[1].tolist() == rows


@pytest.mark.parametrize(("draws", "rows"), [((0, 2), [1, 1]), ((1, 0), [0]), ((1, 1), [0, 1])])
def test_single_tokens_that_draw_another_number(draws, rows):
    builder = InputBuilder(Limits(16, 3, 3, 4, 4), num_groups=1)
    writes = tuple(TableWrite(seq_id, 0, 0, (seq_id,)) for seq_id in (1, 2))
    slices = [(1, 3, [9]), (2, 5, [4])]
    assert builder.build(plan(1, *slices, draws=draws, writes=writes))[1].tolist() == rows

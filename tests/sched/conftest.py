"""A driver that plays machine for a scheduler: each sequence's next token is its last one plus one.

A wrong start, a lost or repeated token or a stale table shows as a wrong number. Invariants are checked after
every operation, and the driver keeps the executor's view of the block tables.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.core import invariants
from octavo.core.block import SeqId
from octavo.core.kv_groups import group_layers
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_spec import FullAttentionSpec
from octavo.core.request import Request, Sequence
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import Sample, StepPlan, StepResult
from octavo.sched.budget import SchedulerConfig
from octavo.sched.scheduler import Scheduler, SequenceOutput


class Driver:
    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 8,
        max_model_len: int = 64,
        prefix_caching: bool = False,
    ) -> None:
        layout = group_layers([FullAttentionSpec(1, 8)])
        self.manager = KVCacheManager(layout, num_blocks, block_size, prefix_caching=prefix_caching)
        config = SchedulerConfig(max_num_batched_tokens, max_num_seqs, max_model_len)
        self.scheduler = Scheduler(config, self.manager, block_size)
        self.plans: list[StepPlan] = []
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.num_added = 0
        self._memory: dict[tuple[int, int], int] = {}  # (block id, slot) -> the token whose keys it holds
        self._tables: dict[int, list[int]] = {}  # seq_id -> block ids as the plans told them

    def add(self, name: str, num_prompt: int, max_tokens: int = 4, **params) -> Request:
        """A request whose prompt counts up from 100 times its number."""
        first = 100 * self.num_added
        prompt = list(range(first, first + num_prompt))
        seq = Sequence(SeqId(self.num_added), 0, prompt, num_prompt)
        self.num_added += 1
        request = Request(name, [seq], SamplingParams(max_tokens=max_tokens, **params), frozenset({-1}))
        self.scheduler.add(request)
        self.outputs[name] = []
        return request

    def abort(self, name: str) -> bool:
        known = self.scheduler.abort(name)
        invariants.check(self.manager)
        return known

    def step(self, fail: frozenset[str] = frozenset()) -> StepPlan:
        plan = self.scheduler.step(0.0)
        invariants.check(self.manager)
        self.plans.append(plan)
        for seq_id in (*plan.preempted, *plan.finished):
            self._tables.pop(seq_id, None)
        samples, failed = [], {}
        for piece in plan.slices:
            self._write_table(piece)
            self._compute(piece)
            if piece.needs_logits:
                name = self.scheduler.book.sequences[piece.seq_id][0].request_id
                if name in fail:
                    failed[piece.seq_id] = "broken"
                else:
                    samples.append(Sample(piece.seq_id, piece.token_ids[-1] + 1))
        for output in self.scheduler.apply(plan, StepResult(plan.step, tuple(samples), failed=failed), 0.0):
            self._record(output)
        invariants.check(self.manager)
        return plan

    def run(self, max_steps: int = 500) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"not done after {max_steps} steps"
        invariants.check_idle(self.manager)

    def expected(self, number: int, num_prompt: int, max_tokens: int) -> list[int]:
        first = 100 * number + num_prompt
        return list(range(first, first + max_tokens))

    def table(self) -> list[str]:
        """The plans as text: sequence@[start,end) with * where a token is drawn, then who lost its blocks."""
        lines = []
        for plan in self.plans:
            parts = [f"{s.seq_id}@[{s.start},{s.end}){'*' if s.needs_logits else ''}" for s in plan.slices]
            parts += [f"preempt {seq_id}" for seq_id in plan.preempted]
            parts += [f"end {seq_id}" for seq_id in plan.finished]
            lines.append(f"{plan.step}: " + " ".join(parts))
        return lines

    def _write_table(self, piece) -> None:
        table = self._tables.setdefault(piece.seq_id, [])
        for write in piece.table_writes:
            table[write.index : write.index + len(write.block_ids)] = write.block_ids
        assert table == self.manager.tables[piece.seq_id][0].block_ids

    def _compute(self, piece) -> None:
        """Write the slice's tokens into its blocks and read the whole context back through the table."""
        size, table = self.manager.block_size, self._tables[piece.seq_id]
        for position, token_id in enumerate(piece.token_ids, piece.start):
            self._memory[table[position // size], position % size] = token_id
        context = [self._memory[table[p // size], p % size] for p in range(piece.end)]
        assert context == self.scheduler.sequence(piece.seq_id).token_ids[: piece.end]

    def _record(self, output: SequenceOutput) -> None:
        self.outputs[output.request_id] += output.token_ids
        if output.finish_reason is not None:
            assert output.request_id not in self.reasons, "finished twice"
            self.reasons[output.request_id] = output.finish_reason
        if output.error is not None:
            self.errors[output.request_id] = output.error


@pytest.fixture(scope="session")
def drive() -> Callable[..., Driver]:
    return Driver

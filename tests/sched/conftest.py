"""A driver that plays machine for a scheduler: each sequence's next token is its last one plus one.

A wrong start, a lost or repeated token or a stale table shows as a wrong number. Invariants are checked after
every operation, and the driver keeps the executor's view of the block tables.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest

from octavo.core import invariants
from octavo.core.block import SeqId
from octavo.core.delta import TokenDelta
from octavo.core.kv_groups import group_layers
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_spec import FullAttentionSpec
from octavo.core.kv_swap import SwapSpace
from octavo.core.request import Request, Sequence
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import StepPlan, StepResult
from octavo.sched.budget import SchedulerConfig
from octavo.sched.scheduler import Scheduler


class Driver:
    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 8,
        max_model_len: int = 64,
        prefix_caching: bool = False,
        num_swap_blocks: int = 0,
        **options,
    ) -> None:
        layout = group_layers([FullAttentionSpec(1, 8)])
        self.manager = KVCacheManager(layout, num_blocks, block_size, prefix_caching=prefix_caching)
        self.swap = SwapSpace(self.manager, num_swap_blocks)
        config = SchedulerConfig(max_num_batched_tokens, max_num_seqs, max_model_len, **options)
        self.scheduler = Scheduler(config, self.manager, block_size, self.swap)
        self.fail_swap: str | None = None  # "out" or "in": every move that way fails
        self.plans: list[StepPlan] = []
        self.outputs: dict[str, list[int]] = {}  # of choice 0
        self.choices: dict[str, dict[int, list[int]]] = {}
        self.reasons: dict[str | tuple[str, int], str] = {}  # by (name, choice) for groups
        self.errors: dict[str, str] = {}
        self.num_added = 0
        self._memory: dict[tuple[int, int], int] = {}  # (block id, slot) -> the token whose keys it holds
        self._swapped: dict[tuple[int, int], int] = {}  # the same in the swap space
        self._tables: dict[int, list[int]] = {}  # seq_id -> block ids as the plans told them

    def add(self, name: str, num_prompt: int, max_tokens: int = 4, **params) -> Request:
        """A request whose prompt counts up from 100 times its number."""
        first = 100 * self.num_added
        prompt = list(range(first, first + num_prompt))
        number = self.num_added
        self.num_added += 1
        wanted = SamplingParams(max_tokens=max_tokens, **params)
        seqs = []
        for index in range(wanted.num_sequences):
            seq_id = SeqId(number) if wanted.n == 1 else self.scheduler.new_seq_id()
            seqs.append(Sequence(SeqId(seq_id - (wanted.n > 1)), index, list(prompt), num_prompt))
        request = Request(name, seqs, wanted, frozenset({-1}))
        self.scheduler.add(request)
        self.outputs[name] = []
        self.choices[name] = {s.index: [] for s in seqs}
        return request

    def abort(self, name: str) -> bool:
        known = self.scheduler.abort(name)
        invariants.check_swap(self.manager, self.swap)
        return known

    def step(self, fail: frozenset[str] = frozenset()) -> StepPlan:
        plan = self.scheduler.step(0.0)
        invariants.check_swap(self.manager, self.swap)
        self.plans.append(plan)
        for seq_id in (*plan.preempted, *plan.finished):
            self._tables.pop(seq_id, None)
        failure = self.play_swaps(plan.swap_out, plan.swap_in)
        for copy in plan.copies:
            for slot in range(self.manager.block_size):
                if (copy.src, slot) in self._memory:
                    self._memory[copy.dst, slot] = self._memory[copy.src, slot]
        self._write_tables(plan)
        answers = [] if failure == "in" else self._compute(plan)
        failed = {
            seq_id: "broken"
            for seq_id, _ in answers
            if self.scheduler.book.sequences[seq_id][0].request_id in fail
        }
        drawn = [None if seq_id in failed else token_id for seq_id, token_id in answers]
        result = StepResult(plan.step, drawn, failed=failed, swap_failure=failure)
        for output in self.scheduler.apply(plan, result, 0.0):
            self._record(output)
        invariants.check_swap(self.manager, self.swap)
        return plan

    def run(self, max_steps: int = 500) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"not done after {max_steps} steps"
        invariants.check_idle(self.manager)
        assert self.swap.num_used == 0

    def expected(self, number: int, num_prompt: int, max_tokens: int) -> list[int]:
        first = 100 * number + num_prompt
        return list(range(first, first + max_tokens))

    def table(self) -> list[str]:
        """The plans as text: sequence@[start,end) with * where a token is drawn, then who lost its blocks."""
        lines = []
        for plan in self.plans:
            columns = zip(plan.seq_ids, plan.ends, plan.lengths, plan.num_draws, strict=True)
            parts = [f"{s}@[{end - length},{end}){'*' if draws else ''}" for s, end, length, draws in columns]
            parts += [f"preempt {seq_id}" for seq_id in plan.preempted]
            parts += [f"end {seq_id}" for seq_id in plan.finished]
            lines.append(f"{plan.step}: " + " ".join(parts))
        return lines

    def _write_tables(self, plan: StepPlan) -> None:
        for seq_id, _, first, block_ids in plan.table_writes:
            self._tables.setdefault(seq_id, [])[first : first + len(block_ids)] = block_ids
        for seq_id in plan.seq_ids:
            assert self._tables[seq_id] == self.manager.tables[seq_id][0].block_ids

    def _compute(self, plan: StepPlan) -> list[tuple[SeqId, int]]:
        """Write each slice's tokens into its blocks and read the whole context back through the table. Who draws
        which token."""
        size, token_ids, drawing = self.manager.block_size, iter(plan.token_ids), iter(plan.drawing)
        answers = []
        columns = zip(plan.seq_ids, plan.ends, plan.lengths, plan.num_draws, strict=True)
        for seq_id, end, length, num_draws in columns:
            table = self._tables[seq_id]
            for position in range(end - length, end):
                self._memory[table[position // size], position % size] = next(token_ids)
            context = [self._memory[table[p // size], p % size] for p in range(end)]
            assert context == self.scheduler.sequence(seq_id).token_ids[:end]
            answers += [(child, context[-1] + 1) for child in islice(drawing, num_draws)]
        assert list(token_ids) == list(drawing) == []
        return answers

    def play_swaps(self, swap_out, swap_in) -> str | None:
        """Move the contents; what fails is lost."""
        if swap_out and self.fail_swap == "out":
            return "out"
        for move in swap_out:
            for slot in range(self.manager.block_size):
                self._swapped[move.swap_id, slot] = self._memory.get((move.block_id, slot))
        if swap_in and self.fail_swap == "in":
            return "in"
        for move in swap_in:
            for slot in range(self.manager.block_size):
                self._memory[move.block_id, slot] = self._swapped[move.swap_id, slot]
        return None

    def _record(self, output: TokenDelta) -> None:
        choices = self.choices[output.request_id]
        choices[output.choice] += output.token_ids
        self.outputs[output.request_id] = choices[0]
        key = output.request_id if len(choices) == 1 else (output.request_id, output.choice)
        if output.finish_reason is not None:
            assert key not in self.reasons, "finished twice"
            self.reasons[key] = output.finish_reason
        if output.error is not None:
            self.errors[key] = output.error


@pytest.fixture(scope="session")
def drive() -> Callable[..., Driver]:
    return Driver

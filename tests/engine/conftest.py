"""An engine around a counting model: its keys and values are the token ids themselves, written and read through
the block tables. It answers last token + 1, and only if it finds its whole context where the tables say;
any corruption of a table, a block or a copy shows as an error or a wrong number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.backends.numpy_ref import softmax_blocks
from octavo.backends.ops import I32, Limits, StepInputs
from octavo.core.kv_groups import group_layers
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_spec import FullAttentionSpec
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.executor import Executor
from octavo.engine.messages import GenerateRequest, Ready, StepOutputs
from octavo.sampling.sampler import Sampler
from octavo.sched.budget import SchedulerConfig
from octavo.sched.scheduler import Scheduler

VOCAB = 4096


class CountingRunner:
    """A Runner whose cache is [N, B] token ids."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.cache = np.full((num_blocks, block_size), -1, np.int32)  # [N, B]
        self.block_size = block_size
        self.fail_on: int | None = None  # raise when this token is in the step
        self.nan_on: int | None = None  # its row of logits becomes NaN
        self._answers = np.zeros(0, np.int32)  # [T]

    def forward(self, inputs: StepInputs) -> None:
        if self.fail_on is not None and self.fail_on in inputs.tokens:
            raise RuntimeError(f"token {self.fail_on} is poison")
        answers = []
        for s, row in enumerate(inputs.table_rows):
            table = inputs.block_tables[0][row]  # [max_blocks]
            for t in range(inputs.query_starts[s], inputs.query_starts[s + 1]):
                position = inputs.positions[t]
                self.cache[table[position // self.block_size], position % self.block_size] = inputs.tokens[t]
                context = self.cache[table].reshape(-1)[: position + 1]
                assert (np.diff(context) == 1).all(), f"context {context.tolist()} does not count"
                answers.append(int(context[-1]) + 1)
        self._answers = np.array(answers, np.int32)

    def logits(self, rows: I32) -> Any:
        logits = np.zeros((len(rows), VOCAB), np.float32)  # [R, V]
        for r, answer in enumerate(self._answers[rows]):
            logits[r, answer % VOCAB] = 10.0
            if self.nan_on is not None and answer - 1 == self.nan_on:
                logits[r] = np.nan
        return logits

    def best(self, logits: Any) -> Any:
        return logits.argmax(axis=1), logits.max(axis=1)

    def run(self, inputs: StepInputs, rows: I32) -> Any:
        self.forward(inputs)
        logits = self.logits(rows)
        return logits, *self.best(logits)

    def copy_blocks(self, src: I32, dst: I32) -> None:
        self.cache[dst] = self.cache[src]

    def fill_block(self, block_id: int, value: float) -> None:
        assert np.isnan(value)
        self.cache[block_id] = -1


class EngineRig:
    """An engine, the tokens each request got and why it ended."""

    def __init__(self, num_blocks: int, block_size: int, config: SchedulerConfig) -> None:
        layout = group_layers([FullAttentionSpec(1, 8)])
        limits = Limits(
            max_tokens=config.max_num_batched_tokens,
            max_seqs=config.max_num_seqs,
            max_table_rows=config.max_num_seqs,
            max_blocks_per_seq=-(-config.max_model_len // block_size),
            max_logit_rows=3,
        )
        self.runner = CountingRunner(num_blocks, block_size)
        self.manager = KVCacheManager(layout, num_blocks, block_size)
        self.executor = Executor(self.runner, Sampler(VOCAB, softmax_blocks), limits, 1)
        self.engine = Engine(
            Scheduler(config, self.manager, block_size),
            self.executor,
            Ready(config.max_model_len, VOCAB, num_blocks, block_size, []),
            frozenset({VOCAB - 1}),
            debug=True,
        )
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, str | None] = {}

    def add(self, name: str, first: int, num_prompt: int, max_tokens: int, **params: Any) -> None:
        prompt = list(range(first, first + num_prompt))
        wanted = SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)
        self.engine.add_request(GenerateRequest(name, prompt, wanted))
        self.tokens[name] = []

    def step(self) -> StepOutputs:
        outputs = self.engine.step()
        for delta in outputs.deltas:
            self.tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                assert delta.request_id not in self.reasons, "finished twice"
                self.reasons[delta.request_id] = delta.finish_reason
                self.errors[delta.request_id] = delta.error
        return outputs

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")


@pytest.fixture(scope="session")
def make_rig() -> Callable[..., EngineRig]:
    def make(
        num_blocks: int = 32,
        block_size: int = 4,
        max_num_batched_tokens: int = 32,
        max_num_seqs: int = 8,
        max_model_len: int = 128,
    ) -> EngineRig:
        config = SchedulerConfig(max_num_batched_tokens, max_num_seqs, max_model_len)
        return EngineRig(num_blocks, block_size, config)

    return make

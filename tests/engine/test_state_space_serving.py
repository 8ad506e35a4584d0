"""Models with recurrent states, served: tokens and logits are the same bits however they are batched, cut into
chunks, preempted, swapped, found in the prefix cache or forked."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.native import NativeBackend
from octavo.config import EngineConfig
from octavo.core import invariants
from octavo.core.sampling_params import SamplingParams
from octavo.engine.build import assemble
from octavo.engine.engine import Engine
from octavo.engine.messages import GenerateRequest
from octavo.weights.loader import open_checkpoint

TINY = Path(__file__).parent.parent / "golden" / "tiny"
NUM_OUT = 12
GREEDY = SamplingParams(max_tokens=NUM_OUT, temperature=0.0, ignore_eos=True)

Logits = dict[tuple[int, int], str]  # (sequence, output position) → hash of the row sampled from


def prompts() -> list[list[int]]:
    """Of 1 to 35 tokens; the last three share their first 17."""
    rng = np.random.default_rng(7)
    drawn = [rng.integers(3, 96, rng.integers(1, 35)).tolist() for _ in range(9)]
    return drawn + [drawn[0][:1] + list(range(10, 26)) + tail for tail in ([5], [6, 7, 8], [9] * 9)]


class Served:
    """An engine over one tiny checkpoint."""

    def __init__(self, model: str, **options: object) -> None:
        checkpoint = open_checkpoint(TINY / model)
        defaults = {"num_blocks_override": 600, "max_num_batched_tokens": 256, "max_num_seqs": 64}
        config = EngineConfig(**{**defaults, "max_model_len": 64, **options})
        self.engine: Engine = assemble(config, checkpoint, NativeBackend(1))
        checkpoint.close()
        self._texts: dict[tuple[str, int], list[int]] = {}

    def run(
        self, prompts: list[list[int]], params: SamplingParams = GREEDY, one_by_one: bool = False
    ) -> list[list[int]]:
        """Serve all at once or one after another → tokens of each choice, request by request."""
        self._texts.clear()
        for i, prompt in enumerate(prompts):
            self.engine.add_request(GenerateRequest(str(i), prompt, params))
            if one_by_one:
                self._drain()
        self._drain()
        invariants.check_idle(self.engine.scheduler.allocator)
        return [self._texts[key] for key in sorted(self._texts, key=lambda k: (int(k[0]), k[1]))]

    def _drain(self) -> None:
        while self.engine.has_work:
            for delta in self.engine.step().deltas:
                assert delta.finish_reason != "error", delta.error
                self._texts.setdefault((delta.request_id, delta.choice), []).extend(delta.token_ids)


def note_logits(served: Served) -> Logits:
    """Watch the sampler from here on."""
    seen: Logits = {}
    sampler = served.engine.executor._sampler
    original = sampler.sample

    def sample(states, logits, best, peaks):
        for state, row in zip(states, logits, strict=True):
            seen[state.seq_id, state.position] = hashlib.sha1(row.tobytes()).hexdigest()
        return original(states, logits, best, peaks)

    sampler.sample = sample
    return seen


@pytest.fixture(scope="module", params=["mamba2", "bamba"])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(model: str) -> tuple[list[list[int]], Logits]:
    """One request after another, whole prompts, nothing cached."""
    served = Served(model, prefix_caching=False)
    seen = note_logits(served)
    return served.run(prompts(), one_by_one=True), seen


@pytest.mark.parametrize(
    "options",
    [
        *({"block_size": size, "num_blocks_override": 2400 // size + 100} for size in (1, 2, 8, 64)),
        *({"max_num_batched_tokens": chunk, "max_num_seqs": chunk} for chunk in (1, 3, 7, 64)),
        {"prefix_caching": False},
    ],
    ids=str,
)
def test_the_shape_of_serving_changes_no_bit(model, alone, options):
    served = Served(model, **options)
    seen = note_logits(served)
    assert served.run(prompts()) == alone[0]
    assert seen == alone[1]


@pytest.mark.parametrize("model", ["bamba"], indirect=True)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("chunk", [5, 256])
def test_preemption_changes_no_bit(model, alone, mode, chunk):
    """A pool that holds few of the requests: the others lose their states and get them again. (Without
    attention a sequence does not grow, so one that was admitted has all it will ever need.)"""
    served = Served(
        model,
        block_size=4,
        num_blocks_override=26,
        max_num_batched_tokens=chunk,
        max_num_seqs=5,
        preemption_mode=mode,
        swap_space_bytes=1 << 24,
        debug=True,
    )
    seen = note_logits(served)
    assert served.run(prompts()) == alone[0]
    assert seen == alone[1]
    assert served.engine.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_conversation_goes_on_from_a_cached_state_and_changes_no_bit(model, alone, block_size):
    """The second turn begins with the first one's prompt and answer, whose last block boundary is a state."""
    second = [prompt + answer + [11, 12] for prompt, answer in zip(prompts(), alone[0], strict=True)]
    uncached = Served(model, prefix_caching=False).run(second)
    served = Served(model, block_size=block_size, num_blocks_override=1000)
    served.run(prompts())
    counters = served.engine.scheduler.counters
    before = counters.num_prompt_tokens_cached
    assert served.run(second) == uncached
    found = counters.num_prompt_tokens_cached - before
    # All of the first turn but its last token, which was never computed, down to whole blocks.
    assert found == sum((len(text) - 3) // block_size * block_size for text in second)


def test_choices_of_one_request_go_on_from_one_state(model):
    """Three draws each from one prompt; without a cache each is what it draws when it is served again."""
    params = SamplingParams(max_tokens=NUM_OUT, temperature=1.0, seed=3, n=3, ignore_eos=True)
    texts = []
    for block_size, chunk in ((16, 256), (4, 7), (1, 256)):
        served = Served(
            model,
            block_size=block_size,
            num_blocks_override=1000,
            max_num_batched_tokens=chunk,
            max_num_seqs=6,
        )
        texts.append(served.run(prompts()[:4], params))
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 12
    assert texts[0][0] != texts[0][1]

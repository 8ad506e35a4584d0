"""Overload and recovery: normal load, twice what the pool holds for a minute, normal load again.

    .venv/bin/python bench/overload.py [--mode auto] [--seconds 60]

The pool holds about 8 of the requests (100 to 200 tokens in, 100 to 200 out). Normal is 6 at a time, overload 24.
Prints output tokens a second of each phase and preemptions per request.
"""

from __future__ import annotations

import argparse
import random
from time import monotonic

from octavo.config import EngineConfig
from octavo.core.sampling_params import SamplingParams
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.engine.messages import GenerateRequest
from octavo.weights import hub

NORMAL, OVERLOAD = 6, 24


class Load:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rng = random.Random(0)
        self.num_started = 0
        self._running = 0
        self.num_preempted = 0
        self.most_of_one = 0
        self._preemptions: dict[str, int] = {}
        self.admitted: list[str] = []

    def run(self, seconds: float, concurrency: int) -> float:
        """Keep `concurrency` requests in the engine; output tokens a second."""
        end, num_tokens = monotonic() + seconds, 0
        while monotonic() < end:
            while self._running < concurrency:
                self._submit()
            num_tokens += self._step()
        return num_tokens / seconds

    def drain(self) -> None:
        while self._engine.has_work:
            self._step()

    def _submit(self) -> None:
        vocab_size = self._engine.info.vocab_size
        prompt = [self._rng.randrange(100, vocab_size) for _ in range(self._rng.randint(100, 200))]
        params = SamplingParams(max_tokens=self._rng.randint(100, 200), temperature=0.0, ignore_eos=True)
        self._engine.add_request(GenerateRequest(str(self.num_started), prompt, params))
        self.num_started += 1
        self._running += 1

    def _step(self) -> int:
        outputs = self._engine.step()
        scheduler = self._engine.scheduler
        self.admitted += [r for r in scheduler.admitted_requests if r not in self._preemptions]
        for decision in scheduler.preemptions:
            count = self._preemptions.get(decision.request_id, 0) + 1
            self._preemptions[decision.request_id] = count
            self.num_preempted += 1
            self.most_of_one = max(self.most_of_one, count)
        self._running -= sum(d.finish_reason is not None for d in outputs.deltas)
        return sum(len(d.token_ids) for d in outputs.deltas)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure recovery from overload.")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    config = EngineConfig(
        num_blocks_override=150,
        preemption_mode=args.mode,
        swap_space_bytes=0 if args.mode == "recompute" else 1 << 28,
    )
    load = Load(build_engine(config, hub.resolve("")))
    load.run(3, NORMAL)
    before = load.run(15, NORMAL)
    during = load.run(args.seconds, OVERLOAD)
    while load._running > NORMAL:
        load._step()
    after = load.run(15, NORMAL)
    load.drain()
    in_order = load.admitted == sorted(load.admitted, key=int)
    print(f"output tokens/s: before {before:,.0f}, during {during:,.0f}, after {after:,.0f}")
    print(f"after / before {after / before:.2f}")
    print(
        f"{load.num_started} requests, {load.num_preempted} preemptions, at most {load.most_of_one} of one request"
    )
    print(f"started in order of arrival: {in_order}")


if __name__ == "__main__":
    main()

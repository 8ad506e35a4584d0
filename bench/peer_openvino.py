"""OpenVINO GenAI's continuous batching on the same requests, in process. Runs in the peers' environment;
bench/peers.py calls it.

    PEERS/bin/python bench/peer_openvino.py MODEL.gguf SLOTS

Prints "ready", then for each line "serve N", "decode N" or "prefill N" that it reads the figure of http_client.py.
"""

from __future__ import annotations

import random
import sys
from time import monotonic

import openvino_genai as ov
from load import closed_loop, words


class Pipeline:
    def __init__(self, path: str, slots: int) -> None:
        scheduler = ov.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 2, slots, 2048
        scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
        self._pipe = ov.ContinuousBatchingPipeline(path, scheduler, "CPU", {})
        self._num_requests = 0

    def add(self, prompt: str, max_tokens: int) -> ov.GenerationHandle:
        config = ov.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        self._num_requests += 1
        return self._pipe.add_request(self._num_requests, prompt, config)

    def run(self, waiting: list[tuple[str, int]], concurrency: int) -> list[float]:
        """The time of every token."""
        running: list[ov.GenerationHandle] = []
        times: list[float] = []
        while waiting or running:
            while waiting and len(running) < concurrency:
                running.append(self.add(*waiting.pop(0)))
            self._pipe.step()
            for handle in list(running):
                while handle.can_read():
                    times += [monotonic()] * sum(len(o.generated_ids) for o in handle.read().values())
                if handle.get_status() != ov.GenerationStatus.RUNNING:
                    running.remove(handle)
        return times

    def serve(self, concurrency: int, turn: int) -> float:
        waiting = closed_loop(concurrency, turn)
        begin = monotonic()
        return len(self.run(waiting, concurrency)) / (monotonic() - begin)

    def decode(self, num_tokens: int) -> float:
        times = self.run([(words(20, random.Random()), num_tokens)], 1)
        return (len(times) - 1) / (times[-1] - times[0])

    def prefill(self, num_words: int) -> float:
        prompt = words(num_words, random.Random())
        num_tokens = self._pipe.get_tokenizer().encode(prompt).input_ids.shape[1]
        begin = monotonic()
        return num_tokens / (self.run([(prompt, 1)], 1)[-1] - begin)


def main(path: str, slots: int) -> None:
    pipeline = Pipeline(path, slots)
    print("ready", flush=True)
    for line in sys.stdin:
        kind, *numbers = line.split()
        measure = {"serve": pipeline.serve, "decode": pipeline.decode, "prefill": pipeline.prefill}[kind]
        print(measure(*map(int, numbers)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

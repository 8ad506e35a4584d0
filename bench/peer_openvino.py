"""OpenVINO GenAI's continuous batching on the same requests, in process. Runs in the peer's own environment.

    PEER/bin/python bench/peer_openvino.py MODEL.gguf CONCURRENCY NUM_REQUESTS

Prints one JSON line. bench/peers.py sets the environment up and calls it.
"""

from __future__ import annotations

import json
import sys
from time import monotonic

import openvino_genai as ov
from load import requests


def main(path: str, concurrency: int, count: int) -> None:
    scheduler = ov.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 2, concurrency, 2048
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    pipe = ov.ContinuousBatchingPipeline(path, scheduler, "CPU", {})
    waiting, running, num_tokens = list(enumerate(requests(count, seed=0))), {}, 0
    begin = monotonic()
    while waiting or running:
        while waiting and len(running) < concurrency:
            i, (prompt, max_tokens) = waiting.pop(0)
            config = ov.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
            running[i] = pipe.add_request(i, prompt, config)
        pipe.step()
        for i, handle in list(running.items()):
            while handle.can_read():
                num_tokens += sum(len(o.generated_ids) for o in handle.read().values())
            if handle.get_status() != ov.GenerationStatus.RUNNING:
                del running[i]
    print(json.dumps({"output_tokens_per_s": num_tokens / (monotonic() - begin)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

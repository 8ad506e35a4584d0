"""llama.cpp's own HTTP server. Runs in the peers' environment; bench/peers.py calls it.

PEERS/bin/python bench/peer_llamacpp.py MODEL.gguf SLOTS PORT
"""

from __future__ import annotations

import os
import sys
import time

import xllamacpp


def main(path: str, slots: int, port: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.port, params.hostnames = path, slots, port, ["127.0.0.1"]
    params.n_ctx, params.kv_unified, params.n_gpu_layers = 1024 * slots, True, 0
    num_threads = len(os.sched_getaffinity(0))
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    server = xllamacpp.Server(params)  # serves as long as it lives
    while server.listening_address:
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

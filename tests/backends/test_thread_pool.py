"""The thread pool, seen through products."""

from __future__ import annotations

import threading
from time import monotonic, sleep

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_jobs_end_with_more_threads_than_cores_awake_or_asleep(threads):
    """Some segments are of fewer panels than parts; pauses let the threads sleep, a busy one takes their core."""
    matrix = NativeBackend(1).matrix(np.ones((96, 64), np.float32), "int8")
    pool, is_over = _native.thread_pool(threads), threading.Event()
    busy = threading.Thread(target=lambda: [None for _ in iter(is_over.is_set, True)])
    busy.start()
    try:
        end, rows = monotonic() + 0.5, 1
        while monotonic() < end:
            assert _native.time_matmul([matrix] * 20, rows, pool, 3, None) > 0
            rows = rows % 19 + 1
            sleep(0.001 * (rows % 3))
    finally:
        is_over.set()
        busy.join()

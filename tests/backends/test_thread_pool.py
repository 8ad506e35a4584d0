"""The thread pool, seen through products and through jobs of nothing but segments."""

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


@pytest.mark.parametrize(("threads", "strands"), [(1, 1), (2, 1), (2, 2), (3, 3), (8, 1), (8, 2), (8, 8)])
@pytest.mark.parametrize("joint_every", [0, 1, 4])
def test_parts_run_once_and_in_order_and_no_thread_sleeps_for_good(threads, strands, joint_every):
    """Parts that last from nothing to longer than a thread stays awake. A part out of order is an error."""
    pool = _native.thread_pool(threads)
    end, job = monotonic() + 0.5, 0
    while monotonic() < end:
        options = {"num_strands": strands, "joint_every": joint_every, "busy_us": job % 60}
        assert _native.time_segments(pool, 1 + job % 9, **options) > 0
        job += 1


def test_strands_that_do_not_divide_the_threads_are_refused():
    with pytest.raises(ValueError, match="as many strands as divide the threads evenly"):
        _native.time_segments(_native.thread_pool(3), 1, num_strands=2)

"""Memory planning, barriers, and the thread pool of the native backend."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native import NativeBackend
from octavo.backends.native_plan import (
    BarrierPlan,
    Buffer,
    Columns,
    Instruction,
    array_buffer,
    mark_uses,
    place,
    without_unread,
)
from octavo.backends.native_record import Recorder
from octavo.core.kv_groups import KVLayer, group_layers
from octavo.core.kv_spec import FullAttentionSpec


def instruction(reads: list[Columns], writes: list[Columns]) -> Instruction:
    return Instruction(lambda program: None, tuple(reads), tuple(writes))


def whole(buffer: Buffer) -> Columns:
    return Columns(buffer, 0, buffer.stride)


def chain(length: int) -> tuple[list[Buffer], list[Instruction]]:
    """Each instruction reads the previous one's array and writes its own."""
    buffers = [array_buffer(4, 16) for _ in range(length)]
    steps = [instruction([], [whole(buffers[0])])]
    steps += [instruction([whole(a)], [whole(b)]) for a, b in zip(buffers, buffers[1:], strict=False)]
    return buffers, steps


def test_a_chain_of_operations_takes_the_memory_of_two_arrays():
    buffers, steps = chain(100)
    assert place(mark_uses(steps, [])) == 2 * 4 * 16
    assert {b.offset for b in buffers} == {0, 64}


def test_an_array_that_is_kept_shares_memory_with_none_after_it():
    buffers, steps = chain(10)
    place(mark_uses(steps, [buffers[3]]))
    kept = buffers[3]
    assert all(b.end <= kept.offset or kept.end <= b.offset for b in buffers[4:])


def test_buffers_alive_together_never_overlap():
    rng = np.random.default_rng(0)
    for _ in range(50):
        buffers = [array_buffer(int(rng.integers(1, 9)), int(rng.integers(1, 99))) for _ in range(30)]
        steps = []
        for _ in range(60):
            reads, writes = rng.integers(0, 30, 2), rng.integers(0, 30, 2)
            steps.append(instruction([whole(buffers[i]) for i in reads], [whole(buffers[i]) for i in writes]))
        used = mark_uses(steps, [])
        place(used)
        for a in used:
            for b in used:
                alive = a.first_use <= b.last_use and b.first_use <= a.last_use
                if a is not b and alive:
                    assert a.end <= b.offset or b.end <= a.offset


def test_a_barrier_stands_only_where_one_operation_needs_another():
    qkv, other = array_buffer(4, 48), array_buffer(4, 16)
    q, k = Columns(qkv, 0, 16), Columns(qkv, 16, 16)
    cache = Columns(Buffer(0))
    steps = [
        instruction([], [whole(qkv)]),
        instruction([q], [q]),  # rope of q
        instruction([k], [k]),  # rope of k: other columns
        instruction([k], [cache]),  # write_kv
        instruction([q, cache], [whole(other)]),  # attention
        instruction([whole(other)], [whole(qkv)]),
    ]
    place(mark_uses(steps, []))
    plan = BarrierPlan()
    assert [plan.needs_barrier(s) for s in steps] == [False, True, False, True, True, True]


def test_reuse_of_memory_needs_a_barrier():
    a, b, c = (array_buffer(4, 16) for _ in range(3))
    steps = [instruction([], [whole(a)]), instruction([whole(a)], [whole(b)]), instruction([], [whole(c)])]
    place(mark_uses(steps, []))
    assert c.offset == a.offset  # a died with the second instruction, which may still be running elsewhere
    plan = BarrierPlan()
    assert [plan.needs_barrier(s) for s in steps] == [False, True, True]


def test_arrays_of_different_layout_never_share_memory():
    a, b, c = array_buffer(4, 16), array_buffer(2, 32), Buffer(64, quantised=(32, 32))
    steps = [instruction([], [whole(a)]), instruction([], [whole(b)]), instruction([], [whole(c)])]
    assert place(mark_uses(steps, [])) == 3 * 64


def test_what_nobody_reads_is_not_written_where_that_can_be_left_out():
    read, unread, asked, must = (array_buffer(4, 16) for _ in range(4))
    quantised = Columns(Buffer(64, quantised=(16, 16)))
    steps = [
        Instruction(lambda program: None, (), (a := whole(read), quantised), a),
        Instruction(lambda program: None, (), (b := whole(unread), quantised), b),
        Instruction(lambda program: None, (), (c := whole(asked), quantised), c),
        instruction([whole(read), quantised], [whole(must)]),
    ]
    left = without_unread(steps, [asked])
    q = quantised.buffer
    assert [[c.buffer for c in s.writes] for s in left] == [[read, q], [q], [asked, q], [must]]
    assert place(mark_uses(left, [asked])) == 4 * 64
    assert unread.offset == -1


def test_a_result_that_is_read_as_int8_only_gets_no_place():
    backend = NativeBackend(1)
    table = backend.embedding(np.ones((9, 64), np.float32), "float32")
    norm, square = backend.vector(np.ones(64, np.float32)), np.ones((64, 64), np.float32)
    gated, matrix = backend.gated_matrix(square, square, "int8"), backend.matrix(square, "int8")
    recorder = Recorder(group_layers([FullAttentionSpec(1, 64)]), 8, 4)
    x = recorder.embed(table)
    unread = recorder.rms_norm(x, norm, 1e-5)
    made = recorder.gated_linear(unread, gated, "silu")
    product = recorder.linear(made, matrix)
    read = recorder.rms_norm(x, norm, 1e-6)
    mixed = recorder.paged_attention(recorder.linear(read, matrix), KVLayer(0, 0), 1.0)
    out = recorder.add(recorder.add(product, recorder.linear(mixed, matrix)), read)
    kept = [out.columns.buffer]
    place(mark_uses(without_unread(recorder.forward, kept), kept))
    assert [v.columns.buffer.offset for v in (unread, made, mixed)] == [-1, -1, -1]
    assert min(v.columns.buffer.offset for v in (x, product, read, out)) >= 0


def test_a_backend_of_the_same_thread_count_shares_the_pool():
    first, second = NativeBackend(2), NativeBackend(2)
    assert first._pool is second._pool
    assert NativeBackend(1)._pool is not first._pool
    with pytest.raises(ValueError, match="num_threads must be within"):
        _native.thread_pool(0)


def test_an_idle_pool_sleeps(rows_runner):
    backend = NativeBackend(2)
    x = np.ones((8, 64), np.float32)
    rows_runner(backend, x, lambda ops, h: ops.scale(h, 2.0))
    time.sleep(0.05)  # patience is 0.5 ms
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.02
    result = rows_runner(backend, x, lambda ops, h: ops.scale(h, 2.0))  # and it wakes
    assert (result == 2.0).all()


def test_many_short_jobs_with_pauses_of_every_length_never_hang(attention_bench, attention_case):
    """Pauses around the pool's patience: workers are spinning, going to sleep or asleep when a job comes."""
    case = attention_case(heads=2, kv_heads=1, head_size=8)
    bench = attention_bench(NativeBackend(3), case, np.ones((4, 32), np.float32))
    bench.give_blocks([4])
    for i in range(300):
        assert (bench.step([(0, 0, 1)], [0]) == 1.0).all()
        time.sleep((i % 10) * 1e-4)


def test_threads_without_a_core_lose_their_parts_to_others_and_nothing_changes(rows_runner):
    """Far more threads than cores: most parts are done by whoever waits for them."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((50, 64)).astype(np.float32)
    weight, norm = rng.standard_normal((64, 64)).astype(np.float32), np.ones(64, np.float32)

    def run(threads: int) -> np.ndarray:
        backend = NativeBackend(threads)
        matrix, scale = backend.matrix(weight, "int8"), backend.vector(norm)

        def layers(ops, h):
            for _ in range(20):
                h = ops.linear(ops.rms_norm(h, scale, 1e-5), matrix, None, h)
            return h

        return rows_runner(backend, x, layers)

    alone = run(1)
    for _ in range(20):
        assert np.array_equal(run(32), alone)


def test_two_python_threads_may_step_two_runners_at_once(attention_bench, attention_case):
    case = attention_case(heads=2, kv_heads=1, head_size=8)
    errors: list[str] = []

    def work(value: float) -> None:
        bench = attention_bench(NativeBackend(2), case, np.full((4, 32), value, np.float32))
        bench.give_blocks([4])
        for _ in range(100):
            if not (bench.step([(0, 0, 4)], [0]) == value).all():
                errors.append(f"wrong result for {value}")

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []

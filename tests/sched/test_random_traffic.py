"""Random arrivals, lengths and aborts on small pools: every answer counts on from its prompt, nothing leaks."""

from __future__ import annotations

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ContextLengthError

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 25)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 40), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    actions=ACTIONS,
    num_blocks=st.integers(1, 20),
    block_size=st.sampled_from([1, 2, 4, 16]),
    max_num_seqs=st.integers(1, 6),
    extra_tokens=st.integers(0, 30),
    prefix_caching=st.booleans(),
)
def test_random_traffic(drive, actions, num_blocks, block_size, max_num_seqs, extra_tokens, prefix_caching):
    d = drive(num_blocks, block_size, max_num_seqs + extra_tokens, max_num_seqs, 64, prefix_caching)
    wanted: dict[str, tuple[int, int, int]] = {}
    for action, x, y in actions:
        if action == "add":
            number = d.num_added
            try:
                d.add(f"r{number}", x, y)
            except ContextLengthError:
                assert x > num_blocks * block_size
            else:
                wanted[f"r{number}"] = (number, x, y)
        elif action == "step":
            for _ in range(x):
                d.step()
        elif d.abort(f"r{x}"):
            del wanted[f"r{x}"]
    d.run(max_steps=5000)
    capacity = num_blocks * block_size
    for name, (number, num_prompt, max_tokens) in wanted.items():
        got = d.outputs[name]
        assert got == d.expected(number, num_prompt, len(got))
        most = min(max_tokens, 64 - num_prompt, capacity + 1 - num_prompt)
        assert len(got) == most
        assert d.reasons[name] == "length"


@settings(max_examples=100, deadline=None)
@given(
    actions=ACTIONS,
    num_blocks=st.integers(4, 20),
    block_size=st.sampled_from([1, 2, 4]),
    extra_tokens=st.integers(0, 12),
    prefix_caching=st.booleans(),
    num_swap_blocks=st.sampled_from([0, 8]),
    n=st.integers(1, 2),
)
def test_the_short_way_of_decoding_plans_what_the_long_way_plans(
    drive, actions, num_blocks, block_size, extra_tokens, prefix_caching, num_swap_blocks, n
):
    mode = "swap" if num_swap_blocks else "recompute"
    drivers = [
        drive(
            num_blocks,
            block_size,
            4 + extra_tokens,
            4,
            64,
            prefix_caching,
            num_swap_blocks,
            preemption_mode=mode,
        )
        for _ in range(2)
    ]
    drivers[1].scheduler._continue_decoding = lambda position: position
    drivers[1].manager._quiet_until = lambda group, table: 0
    for d in drivers:
        for action, x, y in actions:
            if action == "add":
                with contextlib.suppress(ContextLengthError):
                    d.add(f"r{d.num_added}", x, y, n=n)
            elif action == "step":
                for _ in range(x):
                    d.step()
            else:
                d.abort(f"r{x}")
        d.run(max_steps=5000)
    short, long = drivers
    assert short.plans == long.plans
    assert (short.choices, short.reasons) == (long.choices, long.reasons)
    assert short.scheduler.counters == long.scheduler.counters

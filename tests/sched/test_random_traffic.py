"""Random arrivals, lengths and aborts on small pools: every answer counts on from its prompt, nothing leaks."""

from __future__ import annotations

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

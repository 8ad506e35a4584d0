"""A state machine over admit, match, grow, commit, fork, release, swap_out, swap_in and window advance.

The model of the truth is what each sequence wrote: whatever a query of a sequence may still read must be there,
in the KV cache through its table, after any sequence of operations, copies and moves. Runs with an 8-bit hash
too: collisions may cost hits, never content. About 100,000 operations a run.
"""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core import invariants
from octavo.core.allocator import Growth
from octavo.core.block_hash import BlockHash, hash_block
from octavo.core.kv_groups import group_layers
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from octavo.core.kv_swap import SwapSpace
from octavo.core.prefix_index import Tenant

LAYOUTS = {
    "full": [FullAttentionSpec(1, 8)] * 2,
    "two full": [FullAttentionSpec(1, 8), FullAttentionSpec(1, 16)],
    "window": [SlidingWindowSpec(1, 8, window=5)],
    "gemma": [SlidingWindowSpec(1, 8, window=6)] * 2 + [FullAttentionSpec(1, 8)],
    "hybrid": [MambaSpec(4, 8), FullAttentionSpec(1, 8)],
    "states": [MambaSpec(4, 8)],
}
TENANTS = [Tenant(), Tenant(salt="a")]
Token = int
Cell = tuple[int, ...]  # what one slot, or one state, holds: the tokens it was made from


def weak_hash(parent: BlockHash, token_ids: tuple[int, ...]) -> BlockHash:
    return BlockHash(hash_block(parent, token_ids) & 0xFF)


class KVMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.integers(1, 4),
        layout=st.sampled_from(sorted(LAYOUTS)),
        num_swap_blocks=st.integers(0, 12),
        caching=st.sampled_from(["off", "on", "weak"]),
    )
    def start(self, num_blocks, block_size, layout, num_swap_blocks, caching):
        self.manager = KVCacheManager(
            group_layers(LAYOUTS[layout]),
            num_blocks,
            block_size,
            prefix_caching=caching != "off",
            hash_function=weak_hash if caching == "weak" else hash_block,
        )
        self.swap = SwapSpace(self.manager, num_swap_blocks)
        self.cache: dict[tuple[int, int], Cell] = {}  # (block, slot) → content; states use slot 0
        self.swapped: dict[tuple[int, int], Cell] = {}
        self.tokens: dict[int, list[Token]] = {}  # computed tokens of each sequence
        self.tenant: dict[int, Tenant] = {}
        self.tables: dict[tuple[int, int], dict[int, int]] = {}  # what an executor would know
        self.next_id = 0

    # ── operations ──────────────────────────────────────────────────────────────────────────────────

    @rule(prompt=st.lists(st.integers(0, 1), max_size=14), tenant=st.sampled_from(TENANTS))
    def admit(self, prompt, tenant):
        seq, self.next_id = self.next_id, self.next_id + 1
        match = self.manager.match(prompt, tenant)
        free = self.manager.num_blocks_free
        self.manager.admit(seq, tenant, match)
        taken = 0 if match is None else match.num_blocks - match.num_blocks_shared
        assert self.manager.num_blocks_free == free - taken
        hit = 0 if match is None else match.num_tokens
        assert hit < max(1, len(prompt)), "one token is left to compute"
        self.tokens[seq], self.tenant[seq] = prompt[:hit], tenant

    @precondition(lambda self: self.running())
    @rule(data=st.data(), count=st.integers(0, 9), token=st.integers(0, 1))
    def grow(self, data, count, token):
        seq = data.draw(st.sampled_from(self.running()))
        start = len(self.tokens[seq])
        end = self.manager.chunk_end(start, start + count)
        growth = self.manager.grow(seq, end)
        if growth is None:
            assert self.manager.blocks_missing(seq, end) > self.manager.num_blocks_free
            reach = self.manager.reach(seq, end)
            assert self.manager.blocks_missing(seq, reach + 1) > self.manager.num_blocks_free
            end = self.manager.chunk_end(start, reach)
            if end == start:
                return
            growth = self.manager.grow(seq, end)
            assert growth is not None
        self.carry_out(seq, growth)
        self.compute(seq, [token] * (end - start))
        self.manager.commit(seq, self.tokens[seq], end)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.running()))
        seq, self.next_id = self.next_id, self.next_id + 1
        free = self.manager.num_blocks_free
        self.manager.fork(parent, seq)
        assert self.manager.num_blocks_free == free
        self.tokens[seq], self.tenant[seq] = list(self.tokens[parent]), self.tenant[parent]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data):
        seq = data.draw(st.sampled_from(sorted(self.tokens)))
        if seq in self.manager.tables:
            self.manager.release(seq)
        else:
            self.swap.drop(seq)
        self.forget(seq)
        del self.tokens[seq]

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def swap_out(self, data):
        group = data.draw(st.lists(st.sampled_from(self.running()), min_size=1, max_size=3, unique=True))
        moves = self.swap.swap_out(group)
        if moves is None:
            left = self.swap.num_blocks - self.swap.num_used
            assert self.swap.num_blocks == 0 or self.swap.num_distinct(group) > left
            return
        for move in moves:
            for slot in range(self.manager.block_size):
                self.swapped[move.swap_id, slot] = self.cache.get((move.block_id, slot), ())
        for seq in group:
            self.forget(seq)

    @precondition(lambda self: self.swap.tables)
    @rule(data=st.data())
    def swap_in(self, data):
        choices = sorted(self.swap.tables)
        group = data.draw(st.lists(st.sampled_from(choices), min_size=1, max_size=3, unique=True))
        if self.swap.blocks_needed(group) > self.manager.num_blocks_free:
            return
        for move in self.swap.swap_in(group):
            for slot in range(self.manager.block_size):
                self.cache[move.block_id, slot] = self.swapped[move.swap_id, slot]

    @rule()
    def clear(self):
        self.manager.clear_prefixes()

    # ── what must hold ──────────────────────────────────────────────────────────────────────────────

    @invariant()
    def bookkeeping_holds(self):
        invariants.check_swap(self.manager, self.swap)

    @invariant()
    def every_sequence_can_read_what_its_next_query_sees(self):
        for seq in self.running():
            for g, group in enumerate(self.manager.layout.groups):
                self.check_readable(seq, g, group.spec)

    def teardown(self):
        if hasattr(self, "manager"):
            for seq in list(self.tokens):
                if seq in self.manager.tables:
                    self.manager.release(seq)
                else:
                    self.swap.drop(seq)
            invariants.check_idle(self.manager)
            assert self.swap.num_used == 0

    # ── the machine ─────────────────────────────────────────────────────────────────────────────────

    def running(self) -> list[int]:
        return sorted(self.manager.tables) if hasattr(self, "manager") else []

    def forget(self, seq: int) -> None:
        for g in range(len(self.manager.layout.groups)):
            self.tables.pop((seq, g), None)

    def carry_out(self, seq: int, growth) -> None:
        for copy in growth.copies:
            for slot in range(self.manager.block_size):
                self.cache[copy.dst, slot] = self.cache.get((copy.src, slot), ())
        for write in growth.table_writes:
            known = self.tables.setdefault((seq, write.group), {})
            for i, block_id in enumerate(write.block_ids):
                known[write.first + i] = block_id

    def compute(self, seq: int, new: list[Token]) -> None:
        """Write the new tokens' keys, or the new state, through the tables an executor knows."""
        start, size = len(self.tokens[seq]), self.manager.block_size
        self.tokens[seq] += new
        if not new:
            return
        for g, group in enumerate(self.manager.layout.groups):
            known = self.tables[seq, g]
            if isinstance(group.spec, MambaSpec):
                if start:
                    assert self.cache[known[(start - 1) // size], 0] == self.state(seq, start)
                block_id = known[(len(self.tokens[seq]) - 1) // size]
                self.write(block_id, 0, self.state(seq, len(self.tokens[seq])))
            else:
                for position in range(start, len(self.tokens[seq])):
                    self.write(known[position // size], position % size, self.state(seq, position + 1))

    def write(self, block_id: int, slot: int, cell: Cell) -> None:
        assert self.manager.pool.ref_count(block_id) == 1, "written while shared"
        self.cache[block_id, slot] = cell

    def state(self, seq: int, num_tokens: int) -> Cell:
        """Keys of a position and states alike stand for all tokens up to it, and the tenant."""
        return (TENANTS.index(self.tenant[seq]), *self.tokens[seq][:num_tokens])

    def check_readable(self, seq: int, g: int, spec) -> None:
        table, num, size = self.manager.tables[seq][g], len(self.tokens[seq]), self.manager.block_size
        if isinstance(spec, MambaSpec):
            if num:
                assert self.cache[table.block_at((num - 1) // size), 0] == self.state(seq, num)
            return
        first = max(0, num - spec.window + 1) if isinstance(spec, SlidingWindowSpec) else 0
        for position in range(first, num):
            slot = table.locate(position)
            assert self.cache[slot.block_id, slot.offset] == self.state(seq, position + 1)


KVMachine.TestCase.settings = settings(max_examples=1700, stateful_step_count=60, deadline=None)
TestKVMachine = KVMachine.TestCase


@settings(max_examples=200, deadline=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    block_size=st.integers(1, 5),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["grow", "grow", "grow_each", "grow_each", "fork", "release"]),
            st.integers(0, 9),
            st.integers(1, 3),
        ),
        max_size=60,
    ),
)
def test_growing_in_a_block_at_hand_leaves_what_the_long_way_leaves(layout, block_size, operations):
    """The long way looks at every table each time; the short one only where something else than a count changes."""
    short, long = (KVCacheManager(group_layers(LAYOUTS[layout]), 24, block_size) for _ in range(2))
    long._quiet_until = lambda group, table: 0
    lengths = {0: 0}
    short.admit(0)
    long.admit(0)
    for number, (operation, pick, count) in enumerate(operations, 1):
        seq = sorted(lengths)[pick % len(lengths)]
        if operation == "fork":
            lengths[number] = lengths[seq]
            short.fork(seq, number)
            long.fork(seq, number)
        elif operation == "release" and len(lengths) > 1:
            del lengths[seq]
            short.release(seq)
            long.release(seq)
        elif operation == "grow":
            growth = short.grow(seq, lengths[seq] + count)
            assert growth == long.grow(seq, lengths[seq] + count)
            lengths[seq] += count if growth is not None else 0
        elif operation == "grow_each":
            growths = list(takewhile(bool, (long.grow(seq, lengths[seq] + 1) for seq in lengths)))
            writes = tuple(write for growth in growths for write in growth.table_writes)
            copies = tuple(copy for growth in growths for copy in growth.copies)
            assert short.grow_each(list(lengths)) == (len(growths), Growth(writes, copies))
            lengths |= {seq: lengths[seq] + 1 for seq in list(lengths)[: len(growths)]}
        invariants.check(short)
        assert list(short.pool.free_ids()) == list(long.pool.free_ids())
        assert short.stats() == long.stats()
        for seq in lengths:
            assert [t.block_ids for t in short.tables[seq]] == [t.block_ids for t in long.tables[seq]]

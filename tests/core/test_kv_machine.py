"""A state machine over admit, grow, fork and release. The model of the truth is a dict of token lists: every
slot of every sequence must still hold what that sequence wrote there."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from octavo.core import invariants
from octavo.core.kv_groups import group_layers
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_spec import FullAttentionSpec


class KVMachine(RuleBasedStateMachine):
    seqs = Bundle("seqs")

    @initialize(num_blocks=st.integers(1, 24), block_size=st.integers(1, 5), num_groups=st.integers(1, 2))
    def start(self, num_blocks, block_size, num_groups):
        specs = [FullAttentionSpec(1, 8 * (g + 1)) for g in range(num_groups)]
        self.manager = KVCacheManager(group_layers(specs), num_blocks, block_size)
        self.memory: dict[tuple[int, int, int], int] = {}  # (group, block, offset) -> value written
        self.written: dict[int, list[int]] = {}  # sequence -> values by position
        self.tables: dict[tuple[int, int], list[int]] = {}  # what an executor would know
        self.next_value = 0
        self.next_id = 0

    @rule(target=seqs)
    def admit(self):
        seq, self.next_id = self.next_id, self.next_id + 1
        self.manager.admit(seq)
        self.written[seq] = []
        return seq

    @rule(target=seqs, parent=seqs)
    def fork(self, parent):
        seq, self.next_id = self.next_id, self.next_id + 1
        self.manager.fork(parent, seq)
        self.written[seq] = list(self.written[parent])
        return seq

    @rule(seq=seqs, count=st.integers(0, 12))
    def grow(self, seq, count):
        start = len(self.written[seq])
        end = start + count
        free, missing = self.manager.num_blocks_free, self.manager.blocks_missing(seq, end)
        growth = self.manager.grow(seq, end)
        assert (growth is None) == (missing > free)
        if growth is None:
            assert self.manager.num_blocks_free == free
            return
        assert self.manager.num_blocks_free == free - missing
        for copy in growth.copies:
            for offset in range(self.manager.block_size):
                value = self.memory.get((copy.group, copy.src, offset))
                if value is not None:
                    self.memory[copy.group, copy.dst, offset] = value
        for write in growth.table_writes:
            known = self.tables.setdefault((seq, write.group), [])
            known[write.index : write.index + len(write.block_ids)] = write.block_ids
        for position in range(start, end):
            for g, table in enumerate(self.manager.tables[seq]):
                slot = table.locate(position)
                assert self.manager.pool.ref_count(slot.block_id) == 1, "written while shared"
                self.memory[g, slot.block_id, slot.offset] = self.next_value
            self.written[seq].append(self.next_value)
            self.next_value += 1

    @rule(seq=consumes(seqs))
    def release(self, seq):
        self.manager.release(seq)
        del self.written[seq]
        for g in range(len(self.manager.layout.groups)):
            self.tables.pop((seq, g), None)

    @invariant()
    def bookkeeping_holds(self):
        if hasattr(self, "manager"):
            invariants.check(self.manager)

    @invariant()
    def every_sequence_reads_what_it_wrote(self):
        for seq, values in getattr(self, "written", {}).items():
            for g, table in enumerate(self.manager.tables[seq]):
                found = [
                    self.memory[g, (slot := table.locate(p)).block_id, slot.offset]
                    for p in range(len(values))
                ]
                assert found == values

    def teardown(self):
        if hasattr(self, "manager"):
            for seq in list(self.written):
                self.manager.release(seq)
            invariants.check_idle(self.manager)


KVMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestKVMachine = KVMachine.TestCase

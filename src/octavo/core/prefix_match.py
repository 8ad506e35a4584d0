"""find_prefix: the longest cached prefix that every group of layers can use.

A prefix of n blocks is usable when each group still has the blocks that its next query can see: all n for
full attention, the last few for a sliding window. So a window group may have lost the head of a chain and
still hit.

    blocks of the prompt    0   1   2   3   4
    full attention          ■   ■   ■   ■   ·     n <= 4
    window of 2 blocks      ·   ·   ■   ■   ■     n = 4 needs 2, 3: there          → 4 blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from octavo.core.block import BlockId
from octavo.core.kv_groups import KVGroup
from octavo.core.prefix_index import PrefixIndex, PrefixNode, Tenant


def find_prefix(
    index: PrefixIndex, groups: Sequence[KVGroup], block_size: int, token_ids: Sequence[int], tenant: Tenant
) -> tuple[PrefixNode, tuple[tuple[BlockId | None, ...], ...]] | None:
    """The prefix and, for each group, its blocks by logical index (None where no query can see them).

    At least one token is left to compute: its logits are wanted, and they are not cached.
    """
    nodes = _known_nodes(index, block_size, token_ids, tenant)
    runs = [_run_lengths(nodes, g) for g in range(len(groups))]
    for num_blocks in range(len(nodes), 0, -1):
        skipped = [group.spec.num_skipped(num_blocks * block_size, block_size) for group in groups]
        if all(runs[g][num_blocks] >= num_blocks - skipped[g] for g in range(len(groups))):
            blocks = tuple(
                tuple(None if i < skipped[g] else nodes[i].blocks[g] for i in range(num_blocks))
                for g in range(len(groups))
            )
            return nodes[num_blocks - 1], blocks
    return None


def _known_nodes(
    index: PrefixIndex, block_size: int, token_ids: Sequence[int], tenant: Tenant
) -> list[PrefixNode]:
    """The chain of known prefixes, with or without blocks."""
    nodes: list[PrefixNode] = []
    node = index.find_root(tenant)
    bounds = range(0, (len(token_ids) - 1) // block_size * block_size + 1, block_size)
    for start, end in pairwise(bounds):
        if node is not None:
            node = index.find_child(node, tuple(token_ids[start:end]))
        if node is None:
            break
        nodes.append(node)
    return nodes


def _run_lengths(nodes: list[PrefixNode], group: int) -> list[int]:
    """runs[n]: how many consecutive blocks of the group end with block n - 1."""
    runs = [0]
    for node in nodes:
        runs.append(runs[-1] + 1 if group in node.blocks else 0)
    return runs

"""PrefixIndex: which physical blocks hold which prefixes. A tree of full blocks, found by chained hashes.

A node stands for one exact token prefix that ends at a block boundary: its own block's tokens and, through
its parents, all before them. It remembers, for each group of layers, the physical block with the keys and
values of its own positions, as long as that block has not been reused for something else.

    root(tenant) ─▶ [t0 … t15] ─▶ [t16 … t31] ─▶ …
                                     └─▶ [t16'… t31']

A node lives while it has a block, a child or a sequence whose chain ends there. Equal prefixes are one node:
so identity of nodes is equality of prefixes, and verifying one block's tokens verifies the chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.core.block import BlockId
from octavo.core.block_hash import BlockHash, HashFunction, TokenIds, hash_block, hash_root


@dataclass(frozen=True, slots=True)
class Tenant:
    """What keeps prefixes apart: equal tokens under another salt or adapter are other prefixes."""

    salt: str | None = None
    adapter: str | None = None


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One prefix. `parent` is None for a root, which stands for the empty prefix."""

    parent: PrefixNode | None
    token_ids: TokenIds  # of its own block
    key: BlockHash
    tenant: Tenant
    blocks: dict[int, BlockId] = field(default_factory=dict)  # group → block
    num_children: int = 0
    num_holders: int = 0  # sequences whose chain ends here

    @property
    def is_dead(self) -> bool:
        return not (self.blocks or self.num_children or self.num_holders)


class PrefixIndex:
    """Finds, adds and forgets nodes. Never decides what is kept: the pool's reuse order does."""

    def __init__(self, hash_function: HashFunction = hash_block) -> None:
        self._hash = hash_function
        self._roots: dict[Tenant, PrefixNode] = {}
        self._nodes: dict[BlockHash, PrefixNode] = {}
        self._of_block: dict[BlockId, tuple[PrefixNode, int]] = {}  # block → its node and group

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._of_block)

    def items(self) -> Iterator[tuple[BlockId, PrefixNode, int]]:
        """(block, node, group) of every block that can be found."""
        for block_id, (node, group) in self._of_block.items():
            yield block_id, node, group

    @property
    def nodes(self) -> Iterator[PrefixNode]:
        """Every prefix but the empty ones."""
        return iter(self._nodes.values())

    def holds(self, block_id: BlockId) -> bool:
        return block_id in self._of_block

    def find_root(self, tenant: Tenant) -> PrefixNode | None:
        return self._roots.get(tenant)

    def root(self, tenant: Tenant) -> PrefixNode:
        """The empty prefix of a tenant, made if need be."""
        if tenant not in self._roots:
            self._roots[tenant] = PrefixNode(None, (), hash_root(tenant.salt, tenant.adapter), tenant)
        return self._roots[tenant]

    def find_child(self, node: PrefixNode, token_ids: TokenIds) -> PrefixNode | None:
        """The prefix of `node` and one more block, if it is known. Compares the tokens themselves."""
        found = self._nodes.get(self._hash(node.key, token_ids))
        if found is not None and found.parent is node and found.token_ids == token_ids:
            return found
        return None

    def add_child(self, node: PrefixNode, token_ids: TokenIds) -> PrefixNode | None:
        """The same, made if need be. None when another prefix has the hash: then this one stays unknown."""
        key = self._hash(node.key, token_ids)
        if key in self._nodes:
            return self.find_child(node, token_ids)
        child = self._nodes[key] = PrefixNode(node, token_ids, key, node.tenant)
        node.num_children += 1
        return child

    def put(self, node: PrefixNode, group: int, block_id: BlockId) -> None:
        """The block holds the node's positions for the group; a block that already does stays."""
        if group not in node.blocks:
            node.blocks[group] = block_id
            self._of_block[block_id] = (node, group)

    def forget(self, block_id: BlockId) -> None:
        """The block's content is about to be lost."""
        known = self._of_block.pop(block_id, None)
        if known is not None:
            node, group = known
            del node.blocks[group]
            self._prune(node)

    def hold(self, node: PrefixNode) -> None:
        """A sequence's chain ends at the node: it stays, whatever becomes of its blocks."""
        node.num_holders += 1

    def drop(self, node: PrefixNode) -> None:
        """The opposite of hold()."""
        assert node.num_holders > 0, "dropped more often than held"
        node.num_holders -= 1
        self._prune(node)

    def move_hold(self, child: PrefixNode) -> None:
        """A sequence's chain that ended at the child's parent ends at the child."""
        assert child.parent is not None and child.parent.num_holders > 0, "moved more often than held"
        child.parent.num_holders -= 1  # it has a child: it stays
        child.num_holders += 1

    def clear(self) -> None:
        """Forget every block. Nodes that sequences hold remain, without blocks."""
        for block_id in list(self._of_block):
            self.forget(block_id)

    def _prune(self, node: PrefixNode) -> None:
        """Remove dead nodes from here towards the root."""
        current: PrefixNode | None = node
        while current is not None and current.is_dead:
            parent = current.parent
            if parent is None:
                del self._roots[current.tenant]
            else:
                del self._nodes[current.key]
                parent.num_children -= 1
            current = parent

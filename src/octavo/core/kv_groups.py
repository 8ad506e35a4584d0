"""Groups of layers with equal specs, and where each layer's keys and values lie.

All groups share one pool of equal blocks, so they must be of equal size: a spec with more layers than the
rarest one is cut into several groups of that many layers, each with a block table of its own. Layer `i` of a
group uses storage array `i`; block b is the same memory for every group, so a block id belongs to one group
at a time.

    layer             0      1      2      3      4      5       window, window, full, twice
    spec              win    win    full   win    win    full
    (group, storage)  (0,0)  (0,1)  (2,0)  (1,0)  (1,1)  (2,1)   groups of 2 layers: win, win, full
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.kv_spec import KVCacheSpec, KVFormat


@dataclass(frozen=True, slots=True)
class KVLayer:
    """Where one layer's cache lies: which block table it follows and which storage array it uses."""

    group: int
    storage: int


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table per sequence."""

    spec: KVCacheSpec
    layers: tuple[int, ...]  # layer indices of the model


@dataclass(frozen=True, slots=True)
class KVLayout:
    groups: tuple[KVGroup, ...]
    layers: tuple[KVLayer, ...]  # one per model layer
    num_storages: int  # storage arrays; each has num_blocks blocks

    def bytes_per_block(self, block_size: int, kv_format: KVFormat) -> int:
        """Bytes of one block over all storage arrays: the largest spec decides, in whole float32 values."""
        widest = max(g.spec.bytes_per_block(block_size, kv_format) for g in self.groups)
        return -(-widest // 4) * 4 * self.num_storages

    def max_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Most blocks that one sequence of `num_tokens` tokens holds at a time, over all groups."""
        return sum(g.spec.max_blocks(num_tokens, max_chunk, block_size) for g in self.groups)


def group_layers(specs: Sequence[KVCacheSpec]) -> KVLayout:
    """Group layers by equal spec, in order of first appearance, cut to the size of the smallest group."""
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer)
    size = min(len(layers) for layers in by_spec.values())
    groups = tuple(
        KVGroup(spec, tuple(layers[first : first + size]))
        for spec, layers in by_spec.items()
        for first in range(0, len(layers), size)
    )
    where: dict[int, KVLayer] = {}
    for g, group in enumerate(groups):
        for storage, layer in enumerate(group.layers):
            where[layer] = KVLayer(g, storage)
    return KVLayout(groups, tuple(where[layer] for layer in range(len(specs))), size)

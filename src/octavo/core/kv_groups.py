"""Groups of layers with equal specs, and where each layer's keys and values lie.

All groups share one pool of equal blocks. Block b of a group is the same memory as block b of every other
group, so a block id belongs to one group at a time; layer `i` of a group uses storage array `i`.

    layer        0     1     2     3
    spec         full  full  full  full
    (group, storage)  (0,0) (0,1) (0,2) (0,3)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.kv_spec import KVCacheSpec


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

    def bytes_per_block(self, block_size: int, dtype_bytes: float) -> int:
        """Bytes of one block over all storage arrays (the largest spec decides)."""
        widest = max(g.spec.bytes_per_block(block_size, dtype_bytes) for g in self.groups)
        return widest * self.num_storages


def group_layers(specs: Sequence[KVCacheSpec]) -> KVLayout:
    """Group layers by equal spec, in order of first appearance."""
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer)
    groups = tuple(KVGroup(spec, tuple(layers)) for spec, layers in by_spec.items())
    where: dict[int, KVLayer] = {}
    for g, group in enumerate(groups):
        for storage, layer in enumerate(group.layers):
            where[layer] = KVLayer(g, storage)
    layers = tuple(where[layer] for layer in range(len(specs)))
    return KVLayout(groups, layers, max(len(g.layers) for g in groups))

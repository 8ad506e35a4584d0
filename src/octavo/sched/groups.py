"""Sequence groups: what several sequences of one request share, and when each of them can start.

The first live sequence computes what it has alone; another forks from an earlier one at the moment that one
has computed exactly the tokens both have in common. So the prompt of n choices is computed and stored once,
and beams that lost their blocks find back into the same sharing.
"""

from __future__ import annotations

from octavo.core.allocator import KVAllocator
from octavo.core.request import Origin, Request, Sequence


def set_origins(request: Request) -> None:
    """Decide, for a group none of whose sequences is started, where each starts from."""
    for j, seq in enumerate(request.live):
        seq.origin = None
        for parent in request.live[:j]:
            num_shared = _num_shareable(parent, seq)
            if num_shared and (seq.origin is None or num_shared > seq.origin.num_tokens):
                seq.origin = Origin(parent, num_shared)


def set_origins_after_end(request: Request) -> None:
    """A choice was ended from outside: nobody starts from one that is gone."""
    if not request.started:
        set_origins(request)
        return
    for seq in request.live:
        if seq.origin is not None and seq.origin.parent.finish_reason is not None:
            seq.origin = None


def _num_shareable(parent: Sequence, seq: Sequence) -> int:
    """Tokens that `seq` need not compute if it forks from `parent`. One token of its own remains, whose logits
    it needs; but choices that have no output yet all draw from the one last row of the prompt."""
    if not parent.num_output_tokens and not seq.num_output_tokens:
        return seq.num_prompt_tokens
    common = 0
    for a, b in zip(parent.token_ids, seq.token_ids, strict=False):
        if a != b:
            break
        common += 1
    return min(common, parent.num_tokens - 1, seq.num_tokens - 1)


def draws_with(parent: Sequence, request: Request) -> list[Sequence]:
    """The choices that draw their first token from the row of the last prompt token of `parent`."""
    return [
        s
        for s in request.live
        if not s.is_started and s.origin == Origin(parent, s.num_tokens) and not s.num_output_tokens
    ]


def next_fork_point(parent: Sequence, request: Request) -> int | None:
    """Where `parent` must stop for a moment, because somebody forks from it there."""
    points = [
        s.origin.num_tokens
        for s in request.live
        if s.origin is not None and not s.is_started and s.origin.parent is parent
    ]
    return min((p for p in points if p > parent.num_computed_tokens), default=None)


def blocks_to_start(request: Request, allocator: KVAllocator) -> int:
    """Blocks that all known tokens of the sequences that are not started will take."""
    return sum(
        allocator.blocks_for(s.num_tokens, s.origin.num_tokens if s.origin is not None else 0)
        for s in request.live
        if not s.is_started
    )


def blocks_promised(request: Request, allocator: KVAllocator) -> int:
    """Blocks its known tokens will need beyond those it holds."""
    if len(request.live) == 1 and request.live[0].is_started:
        seq = request.live[0]
        return allocator.blocks_missing(seq.seq_id, seq.num_tokens) if seq.gap > 1 else 0
    growing = sum(
        allocator.blocks_missing(s.seq_id, s.num_tokens) for s in request.live if s.is_started and s.gap > 1
    )
    return growing + (blocks_to_start(request, allocator) if len(request.live) > 1 else 0)

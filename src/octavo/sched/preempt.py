"""Who gives way when the pool is empty: the latest arrival, whole, and never the oldest.

The oldest running request always advances, so the engine cannot livelock: each step either computes a
token of the oldest or ends it.
"""

from __future__ import annotations

from octavo.core.request import Request

HEADROOM_TOKENS = 16  # slots a running sequence may claim soon, kept free when somebody is admitted


def choose_victim(running: list[Request]) -> Request | None:
    """The latest arrival, or None when only the oldest is left."""
    return running[-1] if len(running) > 1 else None


def headroom_blocks(num_running_seqs: int, block_size: int) -> int:
    """Blocks to leave free on admission, so that it does not cause a preemption at once (hysteresis)."""
    return num_running_seqs * -(-HEADROOM_TOKENS // block_size)

"""A group grows as a whole or not at all, and a choice may leave it at any time."""

from __future__ import annotations

from typing import Any

import pytest


def choices(rig: Any) -> dict[tuple[str, int], list[int]]:
    """Tokens by request and choice; raises if a request failed."""
    found: dict[tuple[str, int], list[int]] = {}
    for _ in range(2000):
        if not rig.engine.has_work:
            return found
        for delta in rig.engine.step().deltas:
            assert delta.error is None, delta.error
            found.setdefault((delta.request_id, delta.choice), []).extend(delta.token_ids)
    raise AssertionError("not done after 2000 steps")


@pytest.mark.parametrize("num_blocks", range(24, 36))
@pytest.mark.parametrize("num_prompt", [4, 7, 8, 10, 11, 13])
def test_a_group_that_cannot_grow_whole_changes_nothing(
    make_rig: Any, num_blocks: int, num_prompt: int
) -> None:
    """One choice got its block, the next did not, somebody else gave way: the table writes and copies of the
    first were forgotten, and it read another block's content from then on."""
    rig = make_rig(num_blocks=num_blocks)
    rig.add("a", 10, num_prompt, max_tokens=30, n=2)
    rig.add("b", 500, 5, max_tokens=30, n=2)
    for (name, _), tokens in choices(rig).items():
        first = 10 + num_prompt if name == "a" else 505
        assert tokens == list(range(first, first + len(tokens)))


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("num_steps", range(1, 12))
def test_a_choice_may_be_ended_whatever_its_group_does(make_rig: Any, num_steps: int, index: int) -> None:
    """While it reads, decodes, waits preempted, or while others were to fork from the one that ends."""
    rig = make_rig(num_blocks=14, max_num_batched_tokens=8)
    rig.add("old", 500, 6, max_tokens=40)
    rig.add("a", 10, 9, max_tokens=12, n=3)
    got: dict[tuple[str, int], list[int]] = {}
    for _ in range(num_steps):
        for delta in rig.engine.step().deltas:
            got.setdefault((delta.request_id, delta.choice), []).extend(delta.token_ids)
    is_known = rig.engine.scheduler.request("a") is not None
    assert rig.engine.abort("a", index, "stop") == is_known
    assert not rig.engine.abort("a", index, "stop")
    before = {key: len(tokens) for key, tokens in got.items()}
    for key, tokens in choices(rig).items():
        got.setdefault(key, []).extend(tokens)
    assert len(got.get(("a", index), [])) == before.get(("a", index), 0)
    for other in {0, 1, 2} - {index}:
        assert got["a", other] == list(range(19, 31))
    assert got["old", 0] == list(range(506, 546))
    assert rig.manager.pool.num_used == 0


def test_the_last_choice_that_is_ended_ends_the_request(make_rig: Any) -> None:
    rig = make_rig()
    rig.add("a", 10, 5, max_tokens=30, n=2)
    rig.step()
    assert [rig.engine.abort("a", i, "stop") for i in (0, 1)] == [True, True]
    assert rig.engine.scheduler.request("a") is None
    assert rig.manager.pool.num_used == 0
    assert rig.engine.observer.snapshot().finished == {"stop": 1}

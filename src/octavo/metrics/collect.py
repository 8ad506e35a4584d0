"""StepObserver: turns the events of requests into the intervals operators look at.

    arrived ──queue──▶ scheduled ──▶ first token ──inter token──▶ … ──▶ finished
       └────────────── time to first token ──┘                             │
       └─────────────────────────── request ───────────────────────────────┘

It runs where the events happen (the engine process, the simulator) and takes every stamp from its caller, so
one derivation serves wall time and simulated time. It is not a metrics registry: that is metrics/registry.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.core.delta import TokenDelta


@dataclass(slots=True)
class Intervals:
    """Intervals that ended since the last drain, in seconds, and how many requests ended for which reason."""

    ttft_s: list[float] = field(default_factory=list)  # arrival to first token, one a request
    inter_token_s: list[float] = field(default_factory=list)  # one a token but the first of each choice
    request_s: list[float] = field(default_factory=list)  # arrival to end, one a request, whatever the reason
    queue_s: list[float] = field(default_factory=list)  # one a wait: from arrival, and from each preemption
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> requests


@dataclass(slots=True)
class _Request:
    arrived_s: float
    waiting_since_s: float | None  # None while scheduled
    last_token_s: dict[int, float] = field(default_factory=dict)  # choice index -> stamp of its newest token


class StepObserver:
    """Feed it events in the order of their stamps, then `drain()` as often as they are wanted."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._intervals = Intervals()

    @property
    def num_requests(self) -> int:
        """Requests that arrived and have not finished."""
        return len(self._requests)

    def on_arrival(self, request_id: str, now: float) -> None:
        self._requests[request_id] = _Request(arrived_s=now, waiting_since_s=now)

    def on_scheduled(self, request_id: str, now: float) -> None:
        """Part of the request is in this step. Calls while it is already scheduled change nothing."""
        request = self._requests.get(request_id)
        if request is not None and request.waiting_since_s is not None:
            self._intervals.queue_s.append(now - request.waiting_since_s)
            request.waiting_since_s = None

    def on_preempted(self, request_id: str, now: float) -> None:
        """The request lost its blocks and waits again."""
        request = self._requests.get(request_id)
        if request is not None and request.waiting_since_s is None:
            request.waiting_since_s = now

    def on_tokens(self, deltas: Iterable[TokenDelta], now: float) -> None:
        """What a step gave; several tokens at once share the time since the choice's last one equally."""
        get, inter_token_s = self._requests.get, self._intervals.inter_token_s
        for delta in deltas:
            request, count = get(delta.request_id), len(delta.token_ids)
            if request is None or not count:
                continue
            stamps, choice = request.last_token_s, delta.choice
            last = stamps.get(choice)
            if count == 1 and last is not None:
                inter_token_s.append(now - last)
            elif last is not None:
                inter_token_s += [(now - last) / count] * count
            else:
                inter_token_s += [0.0] * (count - 1)
            if not stamps:
                self._intervals.ttft_s.append(now - request.arrived_s)
            stamps[choice] = now

    def on_finished(self, request_id: str, reason: str, now: float) -> None:
        """The whole request ended. One that never arrived (refused outright) is counted without a time."""
        finished = self._intervals.finished
        finished[reason] = finished.get(reason, 0) + 1
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._intervals.request_s.append(now - request.arrived_s)

    def drain(self) -> Intervals:
        """What ended since the last call; the observer starts a new, empty record."""
        drained = self._intervals
        self._intervals = Intervals()
        return drained

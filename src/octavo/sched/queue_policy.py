"""WaitingQueue: first come, first served. A preempted request goes back to the place its arrival gives it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from octavo.core.request import Request


class WaitingQueue:
    """Requests in order of arrival."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=_order)

    def head(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def pop(self) -> Request:
        return self._requests.pop(0)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)


def _order(request: Request) -> int:
    return request.order

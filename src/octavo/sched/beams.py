"""What beam search does to the sequences of a group: fork, append, drop; by reference count alone.

The rule itself is core/beam.py. A parent's first child goes on as the parent's own sequence, further children
fork from it, a parent without children is released. No block is copied before a shared one is written.
"""

from __future__ import annotations

from octavo.core.beam import BeamChoice
from octavo.core.delta import TokenDelta
from octavo.core.request import Request, Sequence
from octavo.sched.book import RequestBook


def advance_beams(book: RequestBook, request: Request) -> list[TokenDelta]:
    """Take one step of the search with every live beam's candidates; outputs once it is over."""
    assert request.beam is not None
    parents = list(request.live)
    choices = request.beam.advance([request.candidates[s.seq_id] for s in parents])
    request.candidates.clear()
    if request.beam.is_done:
        return finish_beams(book, request)
    children = _children(book, request, parents, choices)
    for parent in parents:
        if parent not in children:
            book.end_sequence(request, parent, "length")
    request.live = children
    return []


def finish_beams(book: RequestBook, request: Request) -> list[TokenDelta]:
    """The best hypotheses as the request's choices; the search ends, over or not."""
    assert request.beam is not None
    cached = request.sequences[0].num_cached_tokens
    outputs = [
        TokenDelta(
            request_id=request.request_id,
            choice=index,
            token_ids=hypothesis.token_ids,
            finish_reason=hypothesis.finish_reason,
            stop_token_id=_end_token(request, hypothesis.token_ids),
            num_cached_tokens=cached,
            score=hypothesis.score,
        )
        for index, hypothesis in enumerate(request.beam.best(request.params.n))
    ]
    found, wanted = len(outputs), request.params.n
    error = f"beam search found {found} of the {wanted} answers: the vocabulary has no more, ask for fewer"
    for index in range(found, wanted):  # every choice must end
        outputs.append(TokenDelta(request.request_id, index, (), "error", error=error))
    book.end_all(request, "stop")
    return outputs


def _children(
    book: RequestBook, request: Request, parents: list[Sequence], choices: tuple[BeamChoice, ...]
) -> list[Sequence]:
    """The next live beams, in the order of the choices. All forks come before anything is appended."""
    children: list[Sequence] = []
    for choice in choices:
        parent = parents[choice.parent]
        children.append(
            parent if parent not in children else book.add_fork(request, parent, list(parent.token_ids))
        )
    for child, choice in zip(children, choices, strict=True):
        child.token_ids.append(choice.token_id)
    return children


def _end_token(request: Request, token_ids: tuple[int, ...]) -> int | None:
    assert request.beam is not None
    return token_ids[-1] if token_ids and token_ids[-1] in request.beam.params.end_ids else None

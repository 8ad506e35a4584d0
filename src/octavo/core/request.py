"""Request (a group of sequences, as the client sent it) and Sequence (one token stream of it).

There is no prefill and no decode: a sequence knows `num_tokens` tokens, the keys and values of the first
`num_computed_tokens` of them are in the cache, and every step closes part of the gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from octavo.core.beam import BeamSearch
from octavo.core.block import SeqId
from octavo.core.delta import FinishReason, TokenLogprobs
from octavo.core.prefix_index import Tenant
from octavo.core.sampling_params import SamplingParams

Candidates = tuple[tuple[int, float], ...]  # (token id, log-probability), best first


class RequestStatus(Enum):
    WAITING = "waiting"  # never ran
    RUNNING = "running"
    PREEMPTED = "preempted"  # ran, lost its blocks, waits to compute them again
    SWAPPED = "swapped"  # ran, its blocks lie in the swap space
    FINISHED = "finished"


class Origin(NamedTuple):
    """Where a sequence of a group starts from: the first `num_tokens` tokens of `parent` are its own too."""

    parent: Sequence
    num_tokens: int


@dataclass(slots=True, eq=False)
class Sequence:
    seq_id: SeqId
    index: int  # which choice of its request
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when it first ran
    is_started: bool = False  # it has block tables, in the cache or in the swap space
    origin: Origin | None = None  # not started: fork from there rather than compute it again
    finish_reason: FinishReason | None = None
    # of the prompt tokens but the first, as far as they are known; kept over a preemption
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def gap(self) -> int:
        """Known tokens whose keys and values are not in the cache."""
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(slots=True, eq=False)
class Request:
    """Admitted, preempted and resumed as a whole."""

    request_id: str
    sequences: list[Sequence]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    tenant: Tenant = field(default_factory=Tenant)
    arrival_s: float = 0.0
    order: int = 0  # number of arrival, set by the scheduler
    max_output_tokens: int = 0  # what max_tokens and the context leave, set by the scheduler
    status: RequestStatus = RequestStatus.WAITING
    num_preemptions: int = 0
    num_dropped_tokens: int = 0  # computed ones that the last preemption dropped
    beam: BeamSearch | None = None
    # beam search: candidates of the live sequences that have theirs, until all have
    candidates: dict[SeqId, Candidates] = field(default_factory=dict)
    live: list[Sequence] = field(init=False)  # those without a finish_reason; beams: best first
    end_ids: frozenset[int] = field(init=False)  # tokens that may end a sequence

    def __post_init__(self) -> None:
        self.live = list(self.sequences)
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        self.end_ids = eos.union(self.params.stop_token_ids)

    @property
    def started(self) -> list[Sequence]:
        return [s for s in self.live if s.is_started]

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequences[0].num_prompt_tokens

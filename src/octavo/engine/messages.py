"""What travels between the HTTP process and the engine process, as msgspec values (msgpack on one pipe).

HTTP ──[Submit | Abort | ResetPrefixCache | TakeSnapshot | Shutdown]──▶ engine    one frame may carry many
HTTP ◀──[Ready | StepOutputs | Refused | Reply | Failed]── engine                 one frame a step
"""

from __future__ import annotations

import msgspec

from octavo.core.delta import FinishReason, TokenDelta
from octavo.core.sampling_params import SamplingParams


class GenerateRequest(msgspec.Struct, frozen=True):
    """One request in native types: token ids, never text."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None  # prompts with different salts never share cached blocks
    arrival_s: float = 0.0  # time.monotonic() of the HTTP process (one clock on one machine)


class StepStats(msgspec.Struct, frozen=True):
    """State after a step, counters since the start, and what ended since the last stats (seconds)."""

    requests_running: int = 0
    requests_waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_free: int = 0
    block_size: int = 0
    requests_swapped: int = 0  # of the waiting ones
    blocks_cached: int = 0  # of the free ones: their content can still be found
    blocks_shared: int = 0  # of the used ones: in more than one table
    blocks_saved: int = 0  # that would be used more if nothing were shared
    swap_blocks_total: int = 0
    swap_blocks_used: int = 0
    slots_filled: int = 0  # token slots that hold keys and values, of blocks_used * block_size
    preemptions_total: dict[str, int] = {}  # by kind: recompute, swap
    blocks_swapped_out_total: int = 0
    blocks_swapped_in_total: int = 0
    blocks_copied_total: int = 0  # on write
    prompt_tokens_cached_total: int = 0
    recomputed_tokens_total: int = 0
    prompt_tokens_total: int = 0  # of requests admitted
    generated_tokens_total: int = 0
    computed_tokens_total: int = 0  # rows run through the model
    steps_total: int = 0
    step_s: list[float] = []  # of each step
    schedule_s: float = 0.0  # scheduling, bookkeeping and input building within all of them
    ttft_s: list[float] = []
    inter_token_s: list[float] = []
    request_s: list[float] = []
    queue_s: list[float] = []
    finished: dict[str, int] = {}  # finish reason -> requests


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """What a step gave; stats where they are due."""

    deltas: list[TokenDelta]
    stats: StepStats | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is loaded. `report` is the memory plan in words, one line each."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    report: list[str]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or died. `kind` is the class name in errors.py."""

    kind: str
    message: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that was not accepted: what RequestError says."""

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None


class SequenceBlocks(msgspec.Struct, frozen=True):
    """Where one sequence's cache lies, for one group of layers."""

    request_id: str
    choice: int  # beam search: which of the live beams, best first
    group: int
    block_ids: list[int | None]  # by logical block; None: out of the window, or never stored
    num_tokens: int  # slots filled, those of blocks that are not held included


class BlockSnapshot(msgspec.Struct, frozen=True):
    """The block pool between two steps. Of `tables` and `swap_tables` the ids are those of their own pool."""

    block_size: int
    ref_counts: list[int]  # by block id: table entries that point to it; 0 is free
    cached: list[int]  # blocks whose content can be found, free or in use
    next_free: list[int]  # the next blocks to be handed out, in this order; the first 64
    tables: list[SequenceBlocks]  # running sequences, oldest request first
    num_swap_blocks: int = 0
    swap_tables: list[SequenceBlocks] = []  # swapped sequences


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request, or one choice of it. `reason` is for the statistics."""

    request_id: str
    index: int | None = None
    reason: FinishReason = "abort"


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget every cached prefix. The Reply's value is how many blocks could be found before."""

    call_id: int


class TakeSnapshot(msgspec.Struct, frozen=True, tag=True):
    """The Reply's value is a BlockSnapshot."""

    call_id: int


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to the call of that id."""

    call_id: int
    value: int | BlockSnapshot


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


ToEngine = list[Submit | Abort | ResetPrefixCache | TakeSnapshot | Shutdown]
FromEngine = Ready | StepOutputs | Refused | Reply | Failed

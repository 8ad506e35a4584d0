"""When a sequence ends because of the token it just drew. A pure rule, shared by scheduler and simulator.

Stop *strings* are not known here: the core never sees text. They are matched by sampling/stop.py on the
text side, which then aborts the sequence.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from octavo.core.sampling_params import SamplingParams

TokenFinish = Literal["stop", "length"]


def finish_reason_for_token(
    params: SamplingParams,
    eos_ids: Collection[int],
    token_id: int,
    num_output_tokens: int,
    max_output_tokens: int | None = None,
) -> TokenFinish | None:
    """Why the sequence ends with `token_id`, its `num_output_tokens`-th output token; None if it goes on.

        stop    one of params.stop_token_ids, or an end-of-sequence token unless params.ignore_eos; neither
                within the first params.min_tokens tokens
        length  params.max_tokens reached, or `max_output_tokens`, what the context or the pool still holds

    A token that does both is a stop; with "stop" the token that ended the sequence is `token_id`.
    """
    if num_output_tokens > params.min_tokens:
        if token_id in params.stop_token_ids:
            return "stop"
        if not params.ignore_eos and token_id in eos_ids:
            return "stop"
    if params.max_tokens is not None and num_output_tokens >= params.max_tokens:
        return "length"
    if max_output_tokens is not None and num_output_tokens >= max_output_tokens:
        return "length"
    return None

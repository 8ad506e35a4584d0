"""The border check of SamplingParams: after it, scheduler and sampler trust every field.

Values may come from JSON by way of the server or straight from a caller of LLM, so types are checked too.
It does not know the model's context length or the memory: the engine refuses what does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

from octavo.core.beam import MAX_LENGTH_PENALTY
from octavo.core.sampling_params import SamplingParams
from octavo.errors import RequestError

MAX_CHOICES = 128  # n, best_of and beam_width
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024  # a stop string; as much text can be held back from a stream
MAX_STOP_TOKENS = 256
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
_INT64 = 1 << 63

# What beam search cannot honour, as it draws nothing, with the values that ask for nothing. Its scores are
# those of temperature 1; 0 is what other engines want to be sent with it.
_BEAM_VALUES: dict[str, tuple[object, ...]] = {
    "best_of": (None,),
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0,),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ((), []),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
}
_BOOLS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


def check(params: SamplingParams, *, vocab_size: int, max_logprobs: int) -> None:
    """Raises RequestError, whose `param` is the field at fault, for the first value out of range."""
    for name in _BOOLS:
        value = getattr(params, name)
        if not isinstance(value, bool):
            raise _wrong(name, value, "use true or false")
    check_choices(params.n, params.best_of)
    _check_beam(params, vocab_size)
    if params.seed is not None:
        _check_int("seed", params.seed, -_INT64, _INT64 - 1)
    _check_distribution(params)
    _check_penalties(params)
    _check_bias(params.logit_bias, vocab_size)
    _check_stop(params, vocab_size)
    _check_lengths(params)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None:
            _check_int(name, count, 0, min(max_logprobs, vocab_size))


def check_choices(n: int, best_of: int | None) -> None:
    """Raises RequestError. With beam search the server's best_of is the beam width: the same range."""
    _check_int("n", n, 1, MAX_CHOICES)
    if best_of is not None:
        _check_int("best_of", best_of, 1, MAX_CHOICES)
        if best_of < n:
            raise _wrong("best_of", best_of, f"use at least n, {n}")


def _check_beam(params: SamplingParams, vocab_size: int) -> None:
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise _wrong("early_stopping", params.early_stopping, 'use true, false or "never"')
    if abs(_number("length_penalty", params.length_penalty)) > MAX_LENGTH_PENALTY:
        limit = f"{MAX_LENGTH_PENALTY:g}"
        raise _wrong("length_penalty", params.length_penalty, f"use -{limit} to {limit}")
    if params.beam_width is None:
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(params, name) != default:
                raise _wrong(name, getattr(params, name), "it works with beam search only; leave it out")
        return
    _check_int("beam_width", params.beam_width, 1, min(MAX_CHOICES, vocab_size))
    if params.beam_width < params.n:
        raise _wrong("beam_width", params.beam_width, f"use at least n, {params.n}")
    for name, accepted in _BEAM_VALUES.items():
        value = getattr(params, name)
        if value not in accepted or isinstance(value, bool):
            remedy = "use 0 or 1 or leave it out" if name == "temperature" else "leave it out"
            raise _wrong(name, value, f"beam search cannot honour it; {remedy}")


def _check_distribution(params: SamplingParams) -> None:
    if _number("temperature", params.temperature) < 0:
        raise _wrong("temperature", params.temperature, "use 0 (greedy) or more")
    if not 0 < _number("top_p", params.top_p) <= 1:
        raise _wrong("top_p", params.top_p, "use a number in (0, 1]; 1 turns it off")
    if not _is_int(params.top_k) or params.top_k < 0:
        raise _wrong("top_k", params.top_k, "use a whole number from 1; 0 turns it off")
    if not 0 <= _number("min_p", params.min_p) <= 1:
        raise _wrong("min_p", params.min_p, "use a number in [0, 1]; 0 turns it off")


def _check_penalties(params: SamplingParams) -> None:
    # Beyond this range penalty · logit or logit / penalty leaves float32
    if not 1e-3 <= _number("repetition_penalty", params.repetition_penalty) <= 1e3:
        raise _wrong("repetition_penalty", params.repetition_penalty, "use 0.001 to 1000; 1 turns it off")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if abs(_number(name, value)) > MAX_PENALTY:
            raise _wrong(name, value, f"use -{MAX_PENALTY:g} to {MAX_PENALTY:g}")


def _check_bias(logit_bias: Sequence[tuple[int, float]], vocab_size: int) -> None:
    if not isinstance(logit_bias, tuple | list):
        raise _wrong("logit_bias", logit_bias, "use a tuple of (token id, bias)")
    seen = set()
    for pair in logit_bias:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _wrong("logit_bias", pair, "use a tuple of (token id, bias)")
        token_id, bias = pair
        _check_token("logit_bias", token_id, vocab_size)
        if abs(_number("logit_bias", bias)) > MAX_BIAS:
            raise _wrong("logit_bias", bias, f"use -{MAX_BIAS:g} to {MAX_BIAS:g} for token {token_id}")
        if token_id in seen:
            raise _wrong("logit_bias", token_id, "name each token once")
        seen.add(token_id)


def _check_stop(params: SamplingParams, vocab_size: int) -> None:
    if not isinstance(params.stop, tuple | list):
        raise _wrong("stop", params.stop, "use a tuple of strings")
    if len(params.stop) > MAX_STOP_STRINGS:
        raise _wrong("stop", f"{len(params.stop)} strings", f"use at most {MAX_STOP_STRINGS}")
    for stop in params.stop:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _wrong("stop", stop, f"use strings of 1 to {MAX_STOP_CHARS} characters")
    if not isinstance(params.stop_token_ids, tuple | list):
        raise _wrong("stop_token_ids", params.stop_token_ids, "use a tuple of token ids")
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise _wrong("stop_token_ids", f"{len(params.stop_token_ids)} ids", f"use at most {MAX_STOP_TOKENS}")
    for token_id in params.stop_token_ids:
        _check_token("stop_token_ids", token_id, vocab_size)


def _check_lengths(params: SamplingParams) -> None:
    if params.max_tokens is not None and (not _is_int(params.max_tokens) or params.max_tokens < 1):
        raise _wrong("max_tokens", params.max_tokens, "use a whole number from 1")
    if not _is_int(params.min_tokens) or params.min_tokens < 0:
        raise _wrong("min_tokens", params.min_tokens, "use a whole number from 0")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _wrong("min_tokens", params.min_tokens, f"use at most max_tokens, {params.max_tokens}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not (_is_int(value) and low <= value <= high):
        raise _wrong(name, value, f"use a whole number from {low} to {high}")


def _check_token(name: str, token_id: object, vocab_size: int) -> None:
    if not (_is_int(token_id) and 0 <= token_id < vocab_size):
        raise _wrong(name, token_id, f"token ids are 0 to {vocab_size - 1}")


def _is_int(value: object) -> TypeGuard[int]:
    """True is no number here, though Python's bool is an int."""
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, value: object) -> float:
    """The value as a finite float."""
    if isinstance(value, float) or _is_int(value):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise _wrong(name, value, "use a finite number")


def _wrong(name: str, value: object, remedy: str) -> RequestError:
    shown = repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return RequestError(f"{name} is {shown}: {remedy}.", param=name)

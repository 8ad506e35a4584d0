"""Request bodies to native types: token ids and SamplingParams.

Nothing of the HTTP dialect survives this file. A RequestError about a value is raised here (or in
octavo.sampling.validate, which it calls), before the engine hears of the request; the engine itself refuses
only what does not fit its block pool.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.engine.messages import Ready
from octavo.errors import ContextLengthError, RequestError
from octavo.sampling.validate import check, check_choices
from octavo.server.protocol import ChatBody, CompletionBody, Message, SamplingBody, TokenizeBody
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16  # /v1/completions without max_tokens
MAX_PROMPTS = 2048  # prompts in one completion request
_RENDER_ARGUMENTS = frozenset({"self", "messages", "tools", "add_generation_prompt"})
_LONG_TEXT_CHARS = 16_384  # longer texts are tokenised off the event loop
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `text` is what echo repeats: as it was sent, or decoded."""

    token_ids: list[int]
    text: str | None = None


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids. Long texts do not hold up other requests."""
    if len(text) < _LONG_TEXT_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def completion_prompts(body: CompletionBody, tokenizer: Tokenizer, vocab_size: int) -> list[Prompt]:
    """The prompts of a completion request, in all four spellings. Raises RequestError if one is empty."""
    given = body.prompt
    if isinstance(given, str):
        items: list[Any] = [given]
    elif given and isinstance(given[0], int):
        items = [given]
    else:
        items = list(given)
    if not items or not all(items):
        raise RequestError("The prompt is empty; send some text or token ids.", param="prompt")
    if len(items) > MAX_PROMPTS:
        message = f"{len(items)} prompts in one request; send at most {MAX_PROMPTS}."
        raise RequestError(message, param="prompt")
    add_special = body.add_special_tokens is not False
    prompts = []
    for item in items:
        if isinstance(item, str):
            prompts.append(Prompt(await encode(tokenizer, item, add_special), item))
        else:
            check_token_ids(item, vocab_size, param="prompt")
            skip = body.skip_special_tokens
            text = tokenizer.decode(item, skip_special_tokens=skip) if body.echo else None
            prompts.append(Prompt(list(item), text))
    return prompts


def check_token_ids(token_ids: list[int], vocab_size: int, *, param: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            message = f"Token id {token_id} is not in the vocabulary; ids are 0 to {vocab_size - 1}."
            raise RequestError(message, param=param)


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as the chat template takes them. Raises RequestError for what it cannot render."""
    if not messages:
        raise RequestError("There are no messages; send at least one.", param="messages")
    return [_template_message(i, message) for i, message in enumerate(messages)]


def _template_message(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = _ROLES.get(message.role)
    if role is None:
        message_text = f"{where}.role is {message.role!r}; use one of {', '.join(_ROLES)}."
        raise RequestError(message_text, param=f"{where}.role")
    if message.content is None:
        raise RequestError(f"{where}.content is missing; send a text.", param=f"{where}.content")
    if isinstance(message.content, list):
        for part in message.content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                message_text = (
                    f"{where}.content has a part of type {part.get('type')!r}; only text is supported."
                )
                raise RequestError(message_text, param=f"{where}.content", code="unsupported_parameter")
    extra = {name: value for name, value in (message.model_extra or {}).items() if value not in (None, [])}
    for name in ("tool_calls", "function_call", "tool_call_id", "audio"):
        if name in extra:
            message_text = f"{where}.{name} is not supported by this server; send text only."
            raise RequestError(message_text, param=f"{where}.{name}", code="unsupported_parameter")
    return extra | {"role": role, "content": message.content}


def chat_text(template: ChatTemplate, body: ChatBody | TokenizeBody) -> str:
    """The conversation as one prompt. Raises RequestError."""
    taken = sorted(_RENDER_ARGUMENTS & body.chat_template_kwargs.keys())
    if taken:
        message = f"chat_template_kwargs has {taken[0]!r}; that is a field of the request itself."
        raise RequestError(message, param="chat_template_kwargs")
    return template.render(
        template_messages(body.messages or []),
        add_generation_prompt=body.add_generation_prompt,
        **body.chat_template_kwargs,
    )


def completion_params(body: CompletionBody) -> SamplingParams:
    return replace(
        _params(body),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def chat_params(body: ChatBody, max_logprobs: int) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
    if not 0 <= (body.top_logprobs or 0) <= max_logprobs:
        message = f"top_logprobs is {body.top_logprobs}: use a whole number from 0 to {max_logprobs}."
        raise RequestError(message, param="top_logprobs")
    both = body.max_completion_tokens, body.max_tokens
    if None not in both and both[0] != both[1]:
        message = f"max_completion_tokens is {both[0]} and max_tokens is {both[1]}; send one of them."
        raise RequestError(message, param="max_tokens")
    return replace(
        _params(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_tokens=both[0] if both[0] is not None else both[1],
    )


def _params(body: SamplingBody) -> SamplingParams:
    """The shared fields. Of beam search, whose width is best_of or else n, nothing but the answers differs."""
    check_choices(body.n, body.best_of)
    width = (body.best_of or body.n) if body.use_beam_search else None
    best_of = None if body.use_beam_search else body.best_of
    if body.stream and best_of is not None and best_of > body.n:
        message = (
            f"best_of is {best_of}, more than n: the best are known at the end only; send stream: false."
        )
        raise RequestError(message, param="best_of")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true.", param="stream_options")
    return SamplingParams(
        n=body.n,
        best_of=best_of,
        beam_width=width,
        length_penalty=body.length_penalty,
        early_stopping=body.early_stopping,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=0 if body.top_k == -1 else body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        max_tokens=body.max_tokens,
        min_tokens=body.min_tokens,
        skip_special_tokens=body.skip_special_tokens,
    )


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token_id in bias:
        if not (token_id.isascii() and token_id.removeprefix("-").isdecimal()):
            message = f"logit_bias has the key {token_id!r}; keys are token ids, as strings of digits."
            raise RequestError(message, param="logit_bias")
    return tuple((int(token_id), value) for token_id, value in bias.items())


def fit(params: SamplingParams, prompt: Prompt, info: Ready, *, default_tokens: int | None) -> SamplingParams:
    """`params` with max_tokens settled for this prompt. Raises ContextLengthError if it exceeds the context.

    An explicit max_tokens must fit behind the prompt; a default shrinks to what is left. Whether the prompt
    fits the block pool is the engine's to say: that depends on how the model's layers keep their cache.
    """
    num_prompt = len(prompt.token_ids)
    room = info.max_model_len - num_prompt
    wanted = params.max_tokens
    if room < max(wanted or 0, 1):
        asked = f" and max_tokens asks for {wanted}" if wanted else ""
        raise ContextLengthError(
            f"The context is {info.max_model_len} tokens; the prompt has {num_prompt}{asked}, and at least "
            "one must be left for the answer. Shorten the prompt or lower max_tokens.",
            param="max_tokens" if wanted and room > 0 else "prompt",
        )
    if wanted is None and default_tokens is not None:
        wanted = min(default_tokens, room)
        if params.min_tokens > wanted:
            message = f"min_tokens is {params.min_tokens}: max_tokens defaults to {wanted} here, send it too."
            raise RequestError(message, param="min_tokens")
    return replace(params, max_tokens=wanted)


def check_params(params: SamplingParams, info: Ready, max_logprobs: int) -> None:
    """Ranges of all values. Raises RequestError."""
    check(params, vocab_size=info.vocab_size, max_logprobs=max_logprobs)

"""Request bodies of the HTTP API, as pydantic models. Answers are built where they are sent, not here.

Three kinds of field: one with an effect is declared in its model; one that is known but that Octavo cannot
honour is in UNSUPPORTED and refused with 400 unless its value asks for nothing; one that only labels a
request is in LABELS and accepted. Any other field is refused as unknown. A null means the field is absent.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

# Fields that say who asks or how to file the answer, not what to answer.
LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})


# Known fields without an implementation -> the values that ask for nothing and so are accepted.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class Body(BaseModel):
    """Strict: "1" is no number and 1 is no boolean."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Body):
    include_usage: bool = False  # one last chunk with choices [] and the usage of the request
    continuous_usage_stats: bool = False  # the usage so far on every chunk
    include_obfuscation: Literal[False] = False  # padding against traffic analysis is not done here


class SamplingBody(Body):
    """What completions and chat share. Ranges are checked by octavo.sampling.validate."""

    model: str | None = None
    n: int = 1  # choices returned for each prompt
    best_of: int | None = None  # choices sampled, of which the n best are returned; or the beam width
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 is off
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}  # token id, as a string -> bias
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None  # completions: True; chat: False, as templates write their own
    cache_salt: str | None = None  # requests with different salts share no cached blocks
    stream: bool = False
    stream_options: StreamOptions | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = None  # alternatives per token


class Message(BaseModel):
    """One message. Fields beyond these reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class TokenizeBody(Body):
    """POST /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]

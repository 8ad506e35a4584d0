"""ChatTemplate: a conversation rendered to one prompt string by the model's own Jinja template.

Templates come out of downloaded files, so they run in Jinja's immutable sandbox, with output and repetition
bounded. The environment offers what published templates expect: trimmed blocks, loop controls, `tojson`
without HTML escapes, `raise_exception`, `strftime_now` and the `generation` block.

The rendered text contains the model's special tokens: encode it with add_special_tokens=False.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import RequestError
from octavo.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

_REMEDY = "send a plain prompt (/v1/completions, octavo generate --raw, LLM.generate)"
_MAX_CHARS = 32 << 20  # characters of a rendered prompt
_MAX_REPEATS = 1 << 16  # of a string or list by `*`
_MAX_EXPONENT = 64


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what training learns from; here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with bounded `*` and `**`, which could otherwise fill the memory in one expression."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(right) > _MAX_EXPONENT or abs(left) > 1 << 32):
            raise SecurityError(f"power with the exponent {right} is too large")
        for sequence, count in ((left, right), (right, left)):
            if (
                isinstance(sequence, (str, bytes, list, tuple))
                and isinstance(count, int)
                and count > _MAX_REPEATS
            ):
                raise SecurityError(f"repetition by {count} is too large")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """One template. It is compiled at the first use, so that a broken one stops chats, not the server."""

    def __init__(
        self,
        source: str | None,
        bos_token: str = "",
        eos_token: str = "",
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now
        self._compiled: jinja2.Template | None = None

    @classmethod
    def for_tokenizer(cls, source: str | None, tokenizer: Tokenizer) -> ChatTemplate:
        """The template with the tokenizer's own start and end token."""
        eos = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None
        texts = [tokenizer.token_text(i) if i is not None else None for i in (tokenizer.bos_token_id, eos)]
        return cls(source, texts[0] or "", texts[1] or "")

    @property
    def exists(self) -> bool:
        return self.source is not None

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt. `kwargs` become variables of the template (enable_thinking, documents, …).

        Raises RequestError: no template, a broken template, or messages the template refuses.
        """
        variables = {
            **kwargs,
            **self._tokens,
            "messages": [_plain_message(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._generate(variables)
        except RequestError:
            raise
        except TemplateError as error:
            raise RequestError(f"chat template: {error.message}", param="messages") from error
        except Exception as error:  # anything the template's expressions raise
            raise RequestError(f"chat template: {type(error).__name__}: {error}", param="messages") from error

    def _generate(self, variables: Mapping[str, Any]) -> str:
        if self._compiled is None:
            self._compiled = self._compile()
        pieces: list[str] = []
        num_chars = 0
        for piece in self._compiled.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > _MAX_CHARS:
                raise RequestError(
                    f"chat template: the prompt exceeds {_MAX_CHARS} characters", param="messages"
                )
        return "".join(pieces)

    def _compile(self) -> jinja2.Template:
        if self.source is None:
            raise RequestError(f"the model has no chat template; {_REMEDY}", param="messages")
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: self._now().strftime(form)
        try:
            return environment.from_string(self.source)
        except TemplateSyntaxError as error:
            raise RequestError(
                f"the model's chat template is malformed (line {error.lineno}: {error.message}); {_REMEDY}",
                param="messages",
            ) from error


def _plain_message(message: Message) -> dict[str, Any]:
    """The message as templates expect it: content as one string, arguments of tool calls as objects."""
    plain = dict(message)
    plain["content"] = _plain_content(message.get("content"))
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_tool_call(call) for call in message["tool_calls"]]
    return plain


def _plain_content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"message content part of type {kind!r} is not supported; only text parts are",
                param="messages",
            )
    return "\n".join(texts)


def _plain_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """The API carries `arguments` as a JSON string, templates want the object."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)  # what a model wrote need not be JSON
    return {**call, "function": {**function, "arguments": arguments}}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)

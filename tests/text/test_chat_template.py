"""Chat templates: what published ones expect, what clients send, and what a hostile one cannot do."""

from __future__ import annotations

from datetime import datetime

import pytest

from octavo.errors import RequestError
from octavo.text.chat_template import ChatTemplate
from octavo.weights.loader import open_checkpoint

CHATML = (
    "{% for m in messages %}\n"
    "    {{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages=USER, **kwargs) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages, **kwargs)


@pytest.mark.model
def test_the_default_model_s_template_adds_its_system_prompt(default_model_path):
    checkpoint = open_checkpoint(default_model_path)
    template = ChatTemplate.for_tokenizer(checkpoint.chat_template, checkpoint.tokenizer())
    assert template.render(USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_messages_become_one_prompt():
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    text = "    <|im_start|>system\nBe brief.<|im_end|>\n    <|im_start|>user\nHi<|im_end|>\n"
    assert render(CHATML, messages) == text + "<|im_start|>assistant\n"
    assert render(CHATML, messages, add_generation_prompt=False) == text


def test_blocks_on_their_own_lines_leave_nothing():
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_start_and_end_tokens_are_variables():
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>Hi</s>"


def test_further_arguments_are_variables_but_cannot_replace_the_messages():
    assert render("{{ enable_thinking }} {{ undefined_name }}.", enable_thinking=False) == "False ."
    template = ChatTemplate("{{ messages[0].content }}{{ bos_token }}", "<s>")
    assert template.render(USER, messages="x", bos_token="x") == "Hi<s>"


def test_tools_are_given_to_the_template_or_are_none():
    tool = {"type": "function", "function": {"name": "f", "description": "<é> & 'x'"}}
    assert render("{{ tools[0] | tojson }}", tools=[tool]) == (
        '{"type": "function", "function": {"name": "f", "description": "<é> & \'x\'"}}'
    )
    assert render("{{ tools is none }}") == "True"
    assert render("{{ tools[0].function | tojson(indent=2) }}", tools=[tool]).startswith('{\n  "name": "f"')


def test_text_parts_are_joined_by_lines():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_no_content_is_an_empty_string():
    assert render("[{{ messages[0].content + '' }}]", [{"role": "assistant", "content": None}]) == "[]"
    assert render("[{{ messages[0].content }}]", [{"role": "assistant"}]) == "[]"


def test_other_content_parts_are_refused():
    content = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(RequestError, match="'image_url' is not supported"):
        render(CHATML, [{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("arguments", "shown"), [('{"x": 1}', "1"), ("", ""), ("not json", ""), ({"x": 2}, "2")]
)
def test_arguments_of_tool_calls_become_objects(arguments, shown):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    source = "{{ messages[0].tool_calls[0].function.arguments.x }}"
    assert render(source, [message]) == shown
    assert call["function"]["arguments"] == arguments  # what the client sent is not changed


def test_the_clock_is_the_one_given():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render(USER) == "26 Jul 2024"


def test_loop_controls_and_generation_blocks_are_known():
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hi!"


def test_raise_exception_is_the_template_s_own_message():
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="^chat template: roles must alternate$") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_malformed_template_stops_the_chat_with_its_line():
    template = ChatTemplate("line\n{% if %}")
    for _ in range(2):
        with pytest.raises(RequestError, match="malformed .line 2:.*/v1/completions, octavo generate --raw"):
            template.render(USER)


def test_no_template_names_the_ways_around_it():
    template = ChatTemplate(None)
    assert not template.exists
    with pytest.raises(
        RequestError, match="no chat template; send a plain prompt ./v1/completions, octavo generate --raw"
    ):
        template.render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__closure__[0] }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ('%s' | attr('__class__')).__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 1 / 0 }}",
        "{{ messages.nothing.more }}",
        "{{ messages | nofilter }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_hostile_or_broken_template_is_an_error_of_the_request(source):
    with pytest.raises(RequestError, match="chat template"):
        render(source)


def test_output_is_bounded():
    source = "{% for i in range(60000) %}{{ 'x' * 60000 }}{% endfor %}"
    with pytest.raises(RequestError, match="exceeds 33554432 characters"):
        render(source)


def test_ordinary_arithmetic_still_works():
    assert render("{{ '-' * 3 }}{{ 2 ** 10 }}{{ 3 * 4 }}{{ [0] * 2 }}") == "---102412[0, 0]"

"""`octavo generate`: one prompt, answered on standard output as it is computed, in this process."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Annotated

import typer

from octavo.cli import options
from octavo.config import DEFAULT_MODEL
from octavo.errors import ConfigError


def generate(
    text: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: options.ModelOption = DEFAULT_MODEL,
    is_chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="Ask through the chat template, or continue the text as it is."),
    ] = True,
    stats: Annotated[bool, typer.Option("--stats", help="Print the speed on standard error.")] = False,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.95,
    top_k: options.TopK = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")
    ] = None,
    seed: options.Seed = 0,
    weight_dtype: options.WeightDtypeOption = options.WeightDtype.INT8,
    threads: options.Threads = None,
) -> None:
    """Answer one prompt on the terminal."""
    prompt_text = sys.stdin.read() if text == "-" else text
    if not prompt_text:
        raise ConfigError("the prompt is empty; give some text, or - and text on standard input")
    from octavo.core.sampling_params import SamplingParams
    from octavo.engine.llm import LLM

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, stop=tuple(stop or ())
    )
    llm = LLM(model or DEFAULT_MODEL, weight_dtype=weight_dtype.value, num_threads=threads, seed=seed)
    prompt = llm.chat_prompt([{"role": "user", "content": prompt_text}]) if is_chat else prompt_text
    started = monotonic()
    num_tokens = 0
    for delta in llm.stream(prompt, params):
        num_tokens += len(delta.token_ids)
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if stats:
        elapsed_s = monotonic() - started
        typer.echo(f"{num_tokens} tokens, {num_tokens / elapsed_s:.1f} tokens/s", err=True)

"""`octavo generate`: one prompt, answered on standard output, in this process.

One answer is written as it is computed. Several, or those of a beam search, come when all are there, under a line
each with their number.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli import options
from octavo.config import DEFAULT_MODEL
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.core.sampling_params import SamplingParams
    from octavo.engine.llm import LLM


def generate(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The prompt; - reads it from standard input.")],
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
    n: options.NumChoices = 1,
    best_of: options.BestOf = None,
    beam_width: options.BeamWidth = None,
    length_penalty: options.LengthPenalty = 1.0,
    seed: options.Seed = 0,
    weight_dtype: options.WeightDtypeOption = options.WeightDtype.AUTO,
    weight_cache: options.WeightCache = True,
    threads: options.Threads = None,
    preemption_mode: options.PreemptionModeOption = options.PreemptionMode.AUTO,
    swap_space: options.SwapSpace = "0",
    swap_dir: options.SwapDir = None,
) -> None:
    """Answer one prompt on the terminal."""
    prompt_text = sys.stdin.read() if text == "-" else text
    if not prompt_text:
        raise ConfigError("the prompt is empty; give some text, or - and text on standard input")
    from octavo.core.sampling_params import SamplingParams
    from octavo.engine.llm import LLM

    params = SamplingParams(
        n=n,
        best_of=best_of,
        beam_width=beam_width,
        length_penalty=length_penalty,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
    )
    if beam_width is None:
        params = replace(params, temperature=temperature, top_p=top_p, top_k=top_k)
    num_seqs = max(n, best_of or 1, beam_width or 1)
    llm = LLM(
        model or DEFAULT_MODEL,
        weight_dtype=weight_dtype.value,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(options.STEP_TOKENS, num_seqs),
        weight_cache=weight_cache,
        num_threads=threads,
        seed=seed,
        preemption_mode=preemption_mode.value,
        swap_space_bytes=options.parse_swap_space(swap_space),
        swap_dir=swap_dir,
    )
    prompt = llm.chat_prompt([{"role": "user", "content": prompt_text}]) if is_chat else prompt_text
    started = monotonic()
    is_single = n == 1 and beam_width is None
    num_tokens = _stream(llm, prompt, params) if is_single else _list(llm, prompt, params)
    if stats:
        elapsed_s = monotonic() - started
        typer.echo(f"{num_tokens} tokens, {num_tokens / elapsed_s:.1f} tokens/s", err=True)


def _stream(llm: LLM, prompt: str | Sequence[int], params: SamplingParams) -> int:
    """Write the answer as it comes; returns how many tokens it had."""
    num_tokens = 0
    for delta in llm.stream(prompt, params):
        num_tokens += len(delta.token_ids)
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return num_tokens


def _list(llm: LLM, prompt: str | Sequence[int], params: SamplingParams) -> int:
    """Write all answers, best first where they are ranked; returns how many tokens they had."""
    [output] = llm.generate([prompt], params)
    for choice in output.outputs:
        score = f", score {choice.score:.4f}" if choice.score is not None else ""
        sys.stdout.write(f"── {choice.index + 1}{score}\n{choice.text}\n")
    return output.usage.completion_tokens

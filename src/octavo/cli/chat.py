"""`octavo chat`: a conversation on the terminal, in this process."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli import options
from octavo.config import DEFAULT_MODEL


def chat(
    model: options.ModelArgument = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.95,
    top_k: options.TopK = 0,
    seed: options.Seed = 0,
    weight_dtype: options.WeightDtypeOption = options.WeightDtype.AUTO,
    weight_cache: options.WeightCache = True,
    threads: options.Threads = None,
    preemption_mode: options.PreemptionModeOption = options.PreemptionMode.AUTO,
    swap_space: options.SwapSpace = "0",
    swap_dir: options.SwapDir = None,
) -> None:
    """Talk to a model on the terminal. /help lists what else it understands."""
    from rich.console import Console

    from octavo.cli.conversation import Conversation
    from octavo.core.sampling_params import SamplingParams
    from octavo.engine.llm import LLM

    console = Console()
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens)
    with console.status("loading the model"):
        llm = LLM(
            model or DEFAULT_MODEL,
            weight_dtype=weight_dtype.value,
            max_num_seqs=1,
            max_num_batched_tokens=options.STEP_TOKENS,
            weight_cache=weight_cache,
            num_threads=threads,
            seed=seed,
            preemption_mode=preemption_mode.value,
            swap_space_bytes=options.parse_swap_space(swap_space),
            swap_dir=swap_dir,
        )
    opening = [{"role": "system", "content": system}] if system else []
    # What cannot work is said before anybody types.
    llm.check(params)
    llm.chat_prompt([*opening, {"role": "user", "content": "?"}])
    Conversation(llm, params, console, system).run()

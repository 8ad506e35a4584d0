"""ModelConfig: what a model is, in Octavo's own names. Foreign key names occur only in
weights/config_hf.py and weights/config_gguf.py, which build it.

Canonical tensor names (a Checkpoint answers to these, always float32 [out, in], rope in half-split order):

    embed  norm  lm_head
    layers.{i}.input_norm  .q .k .v .o (.bias)  .q_norm .k_norm  .post_norm  .gate .up .down
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `factors`, when given, divide the base frequencies one by one."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str  # "llama", "mistral", "qwen2", "qwen3", …: the name of the family, as in config.json
    hidden_size: int  # E
    num_layers: int
    num_heads: int  # H
    num_kv_heads: int  # K
    head_size: int  # D
    intermediate_size: int  # F
    vocab_size: int  # V
    max_position: int  # the longest context it was trained for
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    attention_bias: bool = False  # biases on q, k, v
    output_bias: bool = False  # bias on o
    mlp_bias: bool = False
    qk_norm: bool = False  # head-wise RMS norm of q and k before rope
    sliding_window: int | None = None  # every layer's window (Mistral 7B v0.1)
    activation: Literal["silu", "gelu_tanh"] = "silu"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

"""ModelConfig: what a model is, in Octavo's own names. Foreign key names occur only in
weights/config_*.py, which build it.

Canonical tensor names (a Checkpoint answers to these, always float32 [out, in], rope in half-split order):

    embed  norm  lm_head
    layers.{i}.input_norm  .q .k .v .o (.bias)  .q_norm .k_norm .o_norm  .post_norm
               .gate .up .down  .down_norm
    of a state-space layer: .in .out .conv (.bias)  .dt_bias .decay_log .skip  .mixer_norm

A norm is the factor itself: where files store it less one, the Checkpoint adds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


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
    rotated_share: float = 1.0  # of each head's columns, the first ones


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """The state-space mixers (Mamba2) of a model, one in each layer but for those listed."""

    num_heads: int  # H
    head_size: int  # P
    num_groups: int  # G
    state_size: int  # Z
    num_taps: int  # W, of the causal convolution
    conv_bias: bool = True
    proj_bias: bool = False  # biases on in and out
    dt_min: float = 0.0  # the time step is clamped to [dt_min, dt_max]
    dt_max: float = float("inf")
    attention_layers: tuple[int, ...] = ()  # these have attention instead

    @property
    def inner_size(self) -> int:
        """H·P."""
        return self.num_heads * self.head_size

    @property
    def num_channels(self) -> int:
        """C: what is convolved, the scan's input and its b and c of every group."""
        return self.inner_size + 2 * self.num_groups * self.state_size


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str  # "llama", "mistral", "qwen2", "qwen3", …: the name of the family, as in config.json
    hidden_size: int  # E
    num_layers: int
    num_heads: int  # H; 0 in a model without attention
    num_kv_heads: int  # K
    head_size: int  # D
    intermediate_size: int  # F; 0 in a model without feed-forward layers
    vocab_size: int  # V
    max_position: int  # the longest context it was trained for
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    attention_bias: bool = False  # biases on q, k, v
    output_bias: bool = False  # bias on o
    mlp_bias: bool = False
    qk_norm: bool = False  # head-wise RMS norm of q and k before rope
    output_norms: bool = False  # RMS norms of what o and down give, before it is added (Gemma 2 and 3)
    sliding_window: int | None = None  # positions a query of a sliding layer sees, itself included
    sliding_layers: tuple[bool, ...] = ()  # one per layer; empty: all slide, if there is a window
    local_rope: RopeConfig | None = None  # of sliding layers, where theirs differs (Gemma 3)
    query_scale: float | None = None  # factor of q·k; None: D ** -0.5
    attention_softcap: float | None = None  # Gemma 2
    logit_softcap: float | None = None  # Gemma 2
    embedding_scale: float = 1.0  # Gemma: sqrt(E)
    activation: Activation = "silu"
    mamba: MambaConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def window(self, layer: int) -> int | None:
        """Positions that a query of this layer sees; None: all."""
        slides = not self.sliding_layers or self.sliding_layers[layer]
        return self.sliding_window if slides else None

    def layer_rope(self, layer: int) -> RopeConfig:
        if self.local_rope is not None and self.window(layer) is not None:
            return self.local_rope
        return self.rope

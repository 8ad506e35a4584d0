"""The part of config.json that only Gemma 2 and 3 have -> the fields of ModelConfig for it.

    query_pre_attn_scalar   scores are q·k divided by its root
    *_logit_softcapping     Gemma 2's caps of scores and logits
    rope_local_base_freq    Gemma 3's rotary base of sliding layers (older files; newer ones: rope_parameters)

Which layers slide, and everything else of these files, is read in config_hf.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

from octavo.errors import UnsupportedModelError
from octavo.models.config import ModelConfig, RopeConfig
from octavo.weights.json_reader import JsonReader

LOCAL_ROPE_THETA = 10000.0  # Gemma 3


def with_gemma(config: ModelConfig, read: JsonReader) -> ModelConfig:
    """`config`, which has everything that other families have too, with what these add."""
    if read.data.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            f"{read.path}: use_bidirectional_attention is not supported; use a model that generates text"
        )
    return replace(
        config,
        output_norms=True,
        qk_norm=config.model_type == "gemma3",
        embedding_scale=math.sqrt(config.hidden_size),
        query_scale=read.number("query_pre_attn_scalar", config.head_size) ** -0.5,
        attention_softcap=read.number("attn_logit_softcapping", 0.0) or None,
        logit_softcap=read.number("final_logit_softcapping", 0.0) or None,
        local_rope=_local_rope(read) if config.model_type == "gemma3" else None,
    )


def _local_rope(read: JsonReader) -> RopeConfig:
    by_layer = read.data.get("rope_parameters")
    if isinstance(by_layer, dict) and isinstance(by_layer.get("sliding_attention"), dict):
        local = JsonReader(by_layer["sliding_attention"], read.path)
        if local.data.get("rope_type", "default") != "default":
            raise UnsupportedModelError(
                f"{read.path}: rope type {local.data['rope_type']!r} in sliding layers is not supported"
            )
        return RopeConfig(theta=local.number("rope_theta", LOCAL_ROPE_THETA))
    return RopeConfig(theta=read.number("rope_local_base_freq", LOCAL_ROPE_THETA))

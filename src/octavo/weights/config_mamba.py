"""The state-space part of config.json -> MambaConfig, in both spellings that are published.

    Mamba2  num_heads  head_dim  n_groups  state_size  conv_kernel  expand       every layer is a mixer
    Bamba   mamba_n_heads  mamba_d_head  mamba_n_groups  …                        all but attn_layer_indices

Everything else of these files is read in config_hf.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.errors import CorruptModelError
from octavo.models.config import MambaConfig
from octavo.weights.json_reader import Json, JsonReader


def mamba2_config(data: Json, path: Path) -> MambaConfig:
    """Of a model whose layers are all mixers."""
    read = JsonReader(data, path)
    low, high = _limits(data.get("time_step_limit"), path)
    mamba = MambaConfig(
        num_heads=read.count("num_heads"),
        head_size=read.count("head_dim"),
        num_groups=read.count("n_groups", 8),
        state_size=read.count("state_size", 128),
        num_taps=read.count("conv_kernel", 4),
        conv_bias=bool(data.get("use_conv_bias", True)),
        proj_bias=bool(data.get("use_bias", False)),
        dt_min=low,
        dt_max=high,
    )
    return _checked(mamba, read.count("expand", 2) * read.count("hidden_size"), path)


def bamba_config(data: Json, path: Path) -> MambaConfig:
    """Of a hybrid: the layers that are not listed as attention."""
    read = JsonReader(data, path)
    num_layers, num_heads = read.count("num_hidden_layers"), read.count("mamba_n_heads")
    inner = read.count("mamba_expand", 2) * read.count("hidden_size")
    attention = data.get("attn_layer_indices") or []
    if not isinstance(attention, list) or any(i not in range(num_layers) for i in attention):
        raise CorruptModelError(
            f"{path}: attn_layer_indices is {attention!r}; a list of layers below {num_layers} is needed"
        )
    is_auto = data.get("mamba_d_head") == "auto"
    low, high = _limits(data.get("time_step_limit"), path)
    mamba = MambaConfig(
        num_heads=num_heads,
        head_size=inner // num_heads if is_auto else read.count("mamba_d_head", inner // num_heads),
        num_groups=read.count("mamba_n_groups", 1),
        state_size=read.count("mamba_d_state", 256),
        num_taps=read.count("mamba_d_conv", 4),
        conv_bias=bool(data.get("mamba_conv_bias", True)),
        proj_bias=bool(data.get("mamba_proj_bias", False)),
        dt_min=low,
        dt_max=high,
        attention_layers=tuple(attention),
    )
    return _checked(mamba, inner, path)


def _checked(mamba: MambaConfig, inner: int, path: Path) -> MambaConfig:
    if mamba.inner_size != inner:
        raise CorruptModelError(
            f"{path}: {mamba.num_heads} heads of {mamba.head_size} columns do not fill the "
            f"{inner} columns of the expanded hidden size"
        )
    if mamba.num_heads % mamba.num_groups:
        raise CorruptModelError(f"{path}: {mamba.num_heads} heads in {mamba.num_groups} unequal groups")
    return mamba


def _limits(value: Any, path: Path) -> tuple[float, float]:
    """A pair; infinity may be spelled {"__float__": "Infinity"}."""
    if value is None:
        return 0.0, float("inf")
    try:
        low, high = (float(v["__float__"] if isinstance(v, dict) else v) for v in value)
        if 0.0 <= low <= high:
            return low, high
    except (TypeError, ValueError, KeyError):
        pass
    raise CorruptModelError(f"{path}: time_step_limit is {value!r}; two ascending numbers are needed")

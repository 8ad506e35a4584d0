"""Which family runs which model_type, and the one function that builds a model from a checkpoint.

A new family is a file beside this one and a line in MODELS; nothing else in the tree lists model types.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.backends.ops import Backend, WeightDtype
from octavo.errors import ConfigError, UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder, Progress
from octavo.models.gemma3 import load_gemma3
from octavo.models.layers import ParameterLoader, ParameterStore, TensorSource
from octavo.models.llama import load_llama
from octavo.models.mamba_hybrid import load_mamba_hybrid

Load = Callable[[ModelConfig, ParameterLoader, Progress], Decoder]

MODELS: dict[str, Load] = {
    "bamba": load_mamba_hybrid,
    "gemma2": load_gemma3,
    "gemma3": load_gemma3,
    "llama": load_llama,  # Llama 2 and 3, SmolLM, and all that share their layout
    "mamba2": load_mamba_hybrid,
    "mistral": load_llama,
    "qwen2": load_llama,
    "qwen3": load_llama,
}


def build_model(
    config: ModelConfig,
    checkpoint: TensorSource,
    backend: Backend,
    weight_dtype: WeightDtype,
    progress: Progress | None = None,
    store: ParameterStore | None = None,
) -> Decoder:
    """Read every tensor once and pack it for `backend`; the float32 copies are gone when this returns. What `store`
    has packed already is not read.

    `progress(done, total)` is called after each part. Raises UnsupportedModelError for a model_type or a
    variant without code here, ConfigError for native weights of a model that has none, and whatever
    ModelError the checkpoint raises for a bad tensor.
    """
    load = MODELS.get(config.model_type)
    if load is None:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is not supported; supported are: {', '.join(sorted(MODELS))}"
        )
    if weight_dtype == "native" and not checkpoint.has_grouped:
        raise ConfigError(
            "weight dtype 'native' needs a GGUF file with weights of type Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, "
            "Q5_K or Q6_K, and this model has none; use --weight-dtype int8"
        )
    loader = ParameterLoader(checkpoint, backend, weight_dtype, store)
    return load(config, loader, progress or _ignore)


def _ignore(done: int, total: int) -> None:
    """No one is watching."""

"""Which class runs which model_type, and the one function that builds a model from a checkpoint.

A new family is a file beside this one and a line in MODELS; nothing else in the tree lists model types.
"""

from __future__ import annotations

from typing import Protocol

from octavo.backends.ops import Backend, Model, WeightDtype
from octavo.core.kv_spec import KVCacheSpec
from octavo.errors import UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.models.gemma3 import Gemma3
from octavo.models.layers import ParameterLoader, TensorSource
from octavo.models.llama import Llama, Progress
from octavo.models.mamba_hybrid import MambaHybrid


class CausalModel(Model, Protocol):
    """A Model that says which cache its layers need."""

    config: ModelConfig

    def kv_specs(self) -> list[KVCacheSpec]:
        """One per layer; compile it with the layout group_layers() makes of them."""
        ...


MODELS: dict[str, type[Llama] | type[Gemma3] | type[MambaHybrid]] = {
    "bamba": MambaHybrid,
    "gemma2": Gemma3,
    "gemma3": Gemma3,
    "llama": Llama,  # Llama 2 and 3, SmolLM, and all that share their layout
    "mamba2": MambaHybrid,
    "mistral": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
}


def build_model(
    config: ModelConfig,
    checkpoint: TensorSource,
    backend: Backend,
    weight_dtype: WeightDtype,
    progress: Progress | None = None,
) -> CausalModel:
    """Read every tensor once and pack it for `backend`; the float32 copies are gone when this returns.

    `progress(done, total)` is called after each part. Raises UnsupportedModelError for a model_type or a
    variant without code here, and whatever ModelError the checkpoint raises for a bad tensor.
    """
    model_class = MODELS.get(config.model_type)
    if model_class is None:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is not supported; supported are: {', '.join(sorted(MODELS))}"
        )
    loader = ParameterLoader(checkpoint, backend, weight_dtype)
    return model_class.load(config, loader, progress or _ignore)


def _ignore(done: int, total: int) -> None:
    """No one is watching."""

"""Octavo: an LLM serving engine that pages the KV cache.

    from octavo import LLM, SamplingParams

The public names are loaded when first used, so that `import octavo.core` stays within the standard library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.core.sampling_params import SamplingParams
    from octavo.engine.llm import LLM, CompletionOutput, RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams"]

_HOME = {
    "LLM": "octavo.engine.llm",
    "CompletionOutput": "octavo.engine.llm",
    "RequestOutput": "octavo.engine.llm",
    "EngineConfig": "octavo.config",
    "SamplingParams": "octavo.core.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)

"""open_checkpoint: from a local path to an opened Checkpoint, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from octavo.weights.checkpoint import Checkpoint


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder. Names other than local paths: hub.resolve() first.

    Raises ModelNotFoundError, CorruptModelError or UnsupportedModelError.
    """
    path = Path(path)
    if path.is_dir():
        from octavo.weights.hf_folder import HFCheckpoint

        return HFCheckpoint(path)
    if not path.exists():
        raise ModelNotFoundError(
            f"{path}: no such file or folder; give a .gguf file or a folder with config.json"
        )
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        raise UnsupportedModelError(
            f"{path}: give the folder it is in (with config.json and tokenizer.json), not the file"
        )
    from octavo.weights.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path)

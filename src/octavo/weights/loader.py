"""A local path, whatever its format: open_checkpoint() opens it, open_texts() reads what a server needs of it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer
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


def open_texts(path: Path) -> tuple[Tokenizer, str | None]:
    """The tokenizer and the source of the chat template, for a process that does not compute: of a GGUF file no
    tensor is read, and NumPy is not loaded.

    Raises what open_checkpoint() and its tokenizer() do.
    """
    if path.suffix != ".gguf" or not path.is_file():
        with closing(open_checkpoint(path)) as checkpoint:
            return checkpoint.tokenizer(), checkpoint.chat_template
    from octavo.text.tokenizer_gguf import tokenizer_from_gguf
    from octavo.text.vocabulary_gguf import chat_template
    from octavo.weights.config_gguf import architecture
    from octavo.weights.gguf_header import read_parts

    metadata = read_parts(path)[0].metadata
    architecture(metadata, path)  # an unknown one says more than its unknown tokenizer would
    return tokenizer_from_gguf(metadata), chat_template(metadata)

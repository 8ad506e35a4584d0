"""HFCheckpoint: a folder as Hugging Face publishes them, as a Checkpoint.

    config.json  generation_config.json?  model.safetensors | model.safetensors.index.json + parts
    tokenizer.json  tokenizer_config.json?  chat_template.jinja?

Only safetensors are read. Pickled weights (pytorch_model.bin) are refused: opening one runs its code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import CorruptModelError, ModelError, ModelNotFoundError, UnsupportedModelError
from octavo.models.config import ModelConfig
from octavo.models.layers import GroupedWeights, Rows
from octavo.text.tokenizer import Tokenizer
from octavo.weights.checkpoint import F32, check_shapes
from octavo.weights.config_hf import config_from_hf
from octavo.weights.names_hf import hf_name, norm_offset
from octavo.weights.safetensors import SafetensorsFile

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class HFCheckpoint:
    """See checkpoint.Checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"{path}: the folder has no config.json; give a checkpoint folder or a .gguf file"
            )
        generation = read_json(path / "generation_config.json")
        self._config = config_from_hf(read_json(path / "config.json"), generation, path / "config.json")
        self._file_of = {name: file for file in _open_files(path) for name in file.tensors}
        check_shapes(path, self._config, self._shape_of)

    @property
    def files(self) -> list[Path]:
        return [self.path / "config.json", *sorted({file.path for file in self._file_of.values()})]

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def num_bytes(self) -> int:
        return sum(file.tensors[name].num_bytes for name, file in self._file_of.items())

    @property
    def chat_template(self) -> str | None:
        """chat_template.jinja, or the one in tokenizer_config.json (the one named "default" of several)."""
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = read_json(self.path / "tokenizer_config.json").get("chat_template")
        if isinstance(template, list):
            named = {
                entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
            }
            template = named.get("default")
        return template if isinstance(template, str) else None

    def has(self, name: str) -> bool:
        return self._stored_name(name) in self._file_of

    def tensor(self, name: str) -> F32:
        stored = self._stored_name(name)
        file = self._file_of.get(stored)
        if file is None:
            raise ModelError(f"{self.path}: there is no tensor {name!r} (looked for {stored!r})")
        values = file.read(stored)  # [out, in] or [width]
        offset = norm_offset(name, self._config.model_type)
        return values + np.float32(offset) if offset else values

    def rows(self, name: str) -> Rows:
        return self.tensor(name)

    @property
    def has_grouped(self) -> bool:
        return False

    def grouped_type(self, name: str) -> str | None:
        return None

    def grouped(self, name: str) -> GroupedWeights | None:
        return None  # safetensors hold floating-point numbers

    def tokenizer(self) -> Tokenizer:
        from octavo.text.tokenizer_hf import tokenizer_from_folder

        return tokenizer_from_folder(self.path, self._config.bos_token_id, self._config.eos_token_ids)

    def close(self) -> None:
        self._file_of = {}

    def _stored_name(self, name: str) -> str:
        return hf_name(name, self._config.model_type)

    def _shape_of(self, name: str) -> tuple[int, ...] | None:
        stored = self._stored_name(name)
        file = self._file_of.get(stored)
        return None if file is None else file.tensors[stored].shape


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(f"{path}: not JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise CorruptModelError(f"{path}: a JSON object is needed, not {type(data).__name__}")
    return data


def _open_files(path: Path) -> list[SafetensorsFile]:
    if (path / _SINGLE).is_file():
        return [SafetensorsFile(path / _SINGLE)]
    weight_map = read_json(path / _INDEX).get("weight_map")
    if isinstance(weight_map, dict) and weight_map:
        # Names come from a downloaded file: only plain names in this folder are followed.
        names = sorted({Path(str(name)).name for name in weight_map.values()})
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ModelNotFoundError(f"{path}: {missing[0]} is missing; {_INDEX} lists {len(names)} files")
        return [SafetensorsFile(path / name) for name in names]
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise UnsupportedModelError(
            f"{path}: has only {pickles[0]}. Pickled weights are never loaded, since reading them runs code; "
            "use a safetensors or GGUF version of the model"
        )
    raise ModelNotFoundError(f"{path}: no {_SINGLE} and no {_INDEX}; download the model again")

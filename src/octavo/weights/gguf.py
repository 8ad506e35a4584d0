"""GGUFCheckpoint: a GGUF file, or a split one, as a Checkpoint. The format itself is in gguf_file.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.models.config import ModelConfig
from octavo.models.layers import GroupedWeights, Rows
from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary_gguf import chat_template
from octavo.weights.checkpoint import F32, check_shapes
from octavo.weights.config_gguf import architecture, config_from_gguf, gguf_name
from octavo.weights.gguf_blocks import BLOCK_BYTES, grouped_weights
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.gguf_header import read_parts


class GGUFCheckpoint:
    """See checkpoint.Checkpoint. Quantised tensors are dequantised one at a time, when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = [GGUFFile(header) for header in read_parts(path)]
        self._file_of = {name: file for file in self._files for name in file.tensors}
        self.metadata: dict[str, Any] = self._files[0].metadata
        self._permuted_qk = architecture(self.metadata, path).permuted_qk
        shapes = {name: file.tensors[name].shape for name, file in self._file_of.items()}
        self._config = config_from_gguf(self.metadata, shapes, self._rope_factors(), path)
        check_shapes(path, self._config, lambda name: shapes.get(gguf_name(name)))

    @property
    def files(self) -> list[Path]:
        return [file.path for file in self._files]

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for file in self._files for tensor in file.tensors.values())

    @property
    def chat_template(self) -> str | None:
        return chat_template(self.metadata)

    def has(self, name: str) -> bool:
        return gguf_name(name) in self._file_of

    def tensor(self, name: str) -> F32:
        stored = gguf_name(name)
        file = self._file_of.get(stored)
        if file is None:
            raise ModelError(f"{self.path}: there is no tensor {name!r} (looked for {stored!r})")
        values = file.read(stored, self._row_order(name))  # [out, in] or [width]
        file.forget(stored)
        return values

    def rows(self, name: str) -> Rows:
        file = self._file_of.get(gguf_name(name))
        if file is None or self._row_order(name) is not None:
            return self.tensor(name)
        return file.rows(gguf_name(name))

    @property
    def has_grouped(self) -> bool:
        return any(
            tensor.type_name in BLOCK_BYTES and len(tensor.shape) == 2
            for file in self._files
            for tensor in file.tensors.values()
        )

    def grouped_type(self, name: str) -> str | None:
        stored = gguf_name(name)
        file = self._file_of.get(stored)
        if file is None or len(file.tensors[stored].shape) != 2:
            return None
        type_name = file.tensors[stored].type_name
        return type_name if type_name in BLOCK_BYTES else None

    def grouped(self, name: str) -> GroupedWeights | None:
        type_name = self.grouped_type(name)
        if type_name is None:
            return None
        stored = gguf_name(name)
        file = self._file_of[stored]
        raw, row_order = file.raw(stored), self._row_order(name)  # [out, row_bytes]
        weights = grouped_weights(raw if row_order is None else raw[row_order], type_name)
        file.forget(stored)
        return weights

    def tokenizer(self) -> Tokenizer:
        from octavo.text.tokenizer_gguf import tokenizer_from_gguf

        return tokenizer_from_gguf(self.metadata)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _row_order(self, name: str) -> NDArray[np.intp] | None:
        """Which stored row each row of q or k comes from, where they are stored for interleaved rope.

        Stored row h·D + 2i + half is row h·D + half·D/2 + i of the half-split order.
        """
        leaf = name.split(".", 2)[-1].removesuffix(".bias")
        if not self._permuted_qk or leaf not in ("q", "k"):
            return None
        heads = self._config.num_heads if leaf == "q" else self._config.num_kv_heads
        size = self._config.head_size
        rows = np.arange(heads * size).reshape(heads, size // 2, 2)  # [H, D/2, 2]
        return rows.swapaxes(1, 2).reshape(-1)  # [H·D]

    def _rope_factors(self) -> tuple[float, ...]:
        file = self._file_of.get("rope_freqs.weight")
        if file is None:
            return ()
        return tuple(file.read("rope_freqs.weight").tolist())  # [D/2]

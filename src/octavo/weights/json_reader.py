"""JsonReader: typed access to the keys of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import CorruptModelError

Json = Mapping[str, Any]


class JsonReader:
    """A missing or mistyped key is a CorruptModelError that names the file."""

    def __init__(self, data: Json, path: Path) -> None:
        self.data = data
        self.path = path

    def count(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise CorruptModelError(f"{self.path}: {key} is {value!r}; a positive whole number is needed")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.data.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CorruptModelError(f"{self.path}: {key} is {value!r}; a number is needed")
        return float(value)

"""ModelCache: the folder downloaded models are kept in. It knows names, files and sizes; not how to download.

    <cache>/models/<key>/entry.json    name, path, bytes, sha256 of one complete download
    <cache>/models/<key>/<file>        the file, if it was not kept elsewhere in the cache
    <cache>/locks/<key>.lock           held while one process downloads
    <cache>/partial/<key>/             what is being downloaded; emptied by whoever comes next

An entry is written last, by rename, so a download that was cut off is never taken for a model.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Say = Callable[[str], None]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str
    path: Path
    bytes: int


def default_cache_dir() -> Path:
    """$OCTAVO_CACHE, or octavo in the user's cache folder."""
    chosen = os.environ.get("OCTAVO_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


class ModelCache:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_cache_dir()

    def find(self, name: str) -> Path | None:
        """The complete download of this name, if its files are still there in full."""
        entry = _read_entry(self._entry_file(name))
        return entry.path if entry is not None and entry.name == name else None

    def list(self) -> tuple[CachedModel, ...]:
        """Every complete download, by name."""
        found = (_read_entry(file) for file in self.folder.glob("models/*/entry.json"))
        return tuple(sorted((entry for entry in found if entry is not None), key=lambda entry: entry.name))

    def add(self, name: str, path: Path, sha256: str | None) -> Path:
        """Record a finished download. A file from the partial folder moves into the cache first."""
        home = self._entry_file(name).parent
        home.mkdir(parents=True, exist_ok=True)
        if path.is_relative_to(self.folder / "partial"):
            target = home / path.name
            os.replace(path, target)
            path = target
        record = {"name": name, "path": str(path.absolute()), "bytes": _num_bytes(path), "sha256": sha256}
        draft = home / f"entry.{os.getpid()}.tmp"
        draft.write_text(json.dumps(record, indent=1), encoding="utf-8")
        os.replace(draft, self._entry_file(name))
        return path

    @contextmanager
    def downloading(self, name: str, say: Say) -> Iterator[Path]:
        """Hold the lock of this name and give an empty folder to download into; it is removed afterwards."""
        locks, partial = self.folder / "locks", self.folder / "partial" / _key(name)
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / f"{_key(name)}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another process that is downloading {name}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            try:
                yield partial
            finally:
                shutil.rmtree(partial, ignore_errors=True)

    def _entry_file(self, name: str) -> Path:
        return self.folder / "models" / _key(name) / "entry.json"


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _key(name: str) -> str:
    """A readable folder name, unique by a piece of the name's hash."""
    readable = re.sub(r"[^A-Za-z0-9._=-]+", "-", name)[:80]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _read_entry(file: Path) -> CachedModel | None:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        model = CachedModel(str(record["name"]), Path(record["path"]), int(record["bytes"]))
        return model if _num_bytes(model.path) == model.bytes else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no entry, or one that is not whole: the model counts as not downloaded


def _num_bytes(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size

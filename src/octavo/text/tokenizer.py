"""Tokenizer: text to token ids and back, and the raw bytes of one token. Wraps the `tokenizers` library.

Built by tokenizer_gguf.py (from GGUF metadata) or tokenizer_hf.py (from tokenizer.json). It does not
render chat templates (chat_template.py) and keeps no state between calls; incremental detokenising is
detokenize.py's, which needs token_bytes().
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from functools import cache, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_SPACE_MARK = "▁"  # SentencePiece writes a space as U+2581
_NUM_CACHED_BYTES = 4096  # of tokens: most of a text are few


class TokenForm(Enum):
    """How a vocabulary writes bytes down as text."""

    BYTE_LEVEL = "byte_level"  # one printable character a byte, as in GPT-2
    SENTENCE_PIECE = "sentence_piece"  # '▁' for a space, <0xNN> for a lone byte
    PLAIN = "plain"  # as is


class Tokenizer:
    """Immutable, and safe to share between threads."""

    def __init__(
        self, backend: Backend, *, bos_token_id: int | None = None, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._backend = backend
        self._form = _form_of(backend)
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._special = frozenset(i for i, token in added.items() if token.special)
        # Whether decode() strips the space that encoding puts before the first word.
        self.drops_first_space = _drops_first_space(backend)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self._cached_bytes = lru_cache(_NUM_CACHED_BYTES)(self._find_bytes)

    @property
    def vocab_size(self) -> int:
        """Tokens with a text. A model's logits may be wider (padded)."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written out in the text are recognised in any case.

        `add_special_tokens` adds what the model wants around a plain text (often a start token); it must
        be False for a rendered chat template, which contains them.
        """
        return list(self._backend.encode(_well_formed(text), add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole token list. Bytes that are not UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, or None if the vocabulary has no such id."""
        if not 0 <= token_id < 1 << 32:
            return None
        text = self._backend.id_to_token(token_id)
        return None if text is None else str(text)

    def token_id(self, text: str) -> int | None:
        """The id of a token as the vocabulary writes it, or None."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: its text if it is special, none if the id is not in the vocabulary.

        Concatenating them gives decode(ids, skip_special_tokens=False) before decoding as UTF-8 (and, for
        SentencePiece, before the first space is dropped).
        """
        return self._cached_bytes(token_id)

    def _find_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        text = self.token_text(token_id)
        if text is None:
            return b""
        if self._form is TokenForm.BYTE_LEVEL:
            return _byte_level_bytes(text)
        if self._form is TokenForm.SENTENCE_PIECE:
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                return bytes.fromhex(text[3:5])
            return text.replace(_SPACE_MARK, " ").encode()
        return text.encode()

    def is_special(self, token_id: int) -> bool:
        """Whether decode() leaves this token out by default."""
        return token_id in self._special

    @property
    def form(self) -> TokenForm:
        return self._form


def _form_of(backend: Backend) -> TokenForm:
    kinds = _decoder_types(backend)
    if "ByteLevel" in kinds:
        return TokenForm.BYTE_LEVEL
    if kinds & {"ByteFallback", "Metaspace"}:
        return TokenForm.SENTENCE_PIECE
    return TokenForm.PLAIN


def _decoder_state(backend: Backend) -> list[dict[str, object]]:
    """The decoder as the library serialises it, a Sequence flattened to its members."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    members = state.get("decoders", [state]) if isinstance(state, dict) else []
    return list(members)


def _decoder_types(backend: Backend) -> set[str]:
    return {str(member.get("type")) for member in _decoder_state(backend)}


def _drops_first_space(backend: Backend) -> bool:
    return any(
        member.get("type") == "Strip"
        or (member.get("type") == "Metaspace" and member.get("prepend_scheme", "always") != "never")
        for member in _decoder_state(backend)
    )


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _byte_level_bytes(text: str) -> bytes:
    table = _byte_of_char()
    if any(char not in table for char in text):
        return text.encode()  # an added token that the library does not list
    return bytes(table[char] for char in text)


def _well_formed(text: str) -> str:
    """JSON may carry lone surrogates, which no UTF-8 library takes: pairs are joined, lone ones replaced."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text

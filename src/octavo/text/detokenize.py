"""IncrementalDetokenizer: token ids to text as they arrive, whatever the tokens cut apart.

A token is bytes, not text: one emoji may take four tokens, and one token may hold the end of one character
and the start of the next. Bytes that do not make up a character yet are held back; bytes that never can
become U+FFFD, exactly as bytes.decode("utf-8", "replace") does. So the concatenated pieces equal the text
decoded at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """One per choice. `num_chars` counts the characters given out."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        is_special: Callable[[int], bool],
        *,
        skip_special: bool = True,
        strip_leading_space: bool = False,
    ) -> None:
        """`strip_leading_space` drops one space at the very start: what SentencePiece models with a dummy
        prefix do to a whole text. A continuation of a prompt keeps it."""
        self._token_bytes = token_bytes
        self._is_special = is_special
        self._skip_special = skip_special
        self._strip = strip_leading_space
        self._decoder = _utf8(errors="replace")
        self.num_chars = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is complete with these tokens; may be empty."""
        data = b""
        for token_id in token_ids:
            if not (self._skip_special and self._is_special(token_id)):
                data += self._token_bytes(token_id)
        return self._emit(self._decoder.decode(data))

    def flush(self) -> str:
        """U+FFFD if the tokens ended in the middle of a character, else nothing."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        self.num_chars += len(text)
        return text

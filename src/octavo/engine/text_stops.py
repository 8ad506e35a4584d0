"""TextStops: whether an output's newest token completes a stop string, judged on the engine's side.

Stop strings are found where text is made, by sampling/stop.py, which may be steps later and knows only choices
that are sent. Beams and the candidates of best_of must end at once, so that the right tokens are ranked. The
answer is the same: UTF-8 finds in bytes exactly what it finds in characters.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.sampling_params import SamplingParams
from octavo.text.output import TokenTexts


class TextStops:
    """The stop strings of one request. It keeps no text: ask about any output."""

    def __init__(self, tokenizer: TokenTexts, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._stops = tuple(stop.encode() for stop in params.stop)
        self._longest = max(map(len, self._stops))  # bytes

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Of these output tokens, whether the last one completes a stop string."""
        last = self._bytes(token_ids[-1])
        if not last:
            return False
        parts = [last]
        num_before = 0  # bytes in front of the last token's
        position = len(token_ids) - 1
        while position > 0 and num_before < self._longest - 1:
            position -= 1
            parts.append(self._bytes(token_ids[position]))
            num_before += len(parts[-1])
        tail = b"".join(reversed(parts))
        return any(tail.find(stop, max(0, num_before + 1 - len(stop))) >= 0 for stop in self._stops)

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

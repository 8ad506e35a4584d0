"""GGUFVocabulary: the tokenizer keys of a GGUF file's metadata, read once and checked.

token type    1 normal  2 unknown  3 control  4 user defined  5 unused  6 byte
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import CorruptModelError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

_PREFIX = "tokenizer.ggml."
# Texts that end a turn or a document in the chat formats of the supported families. A GGUF file names one
# end token, where the models were published with a list of them.
_END_TEXTS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>"}
)


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """All lists are as long as `tokens` (scores may be empty), all ids are within them.

    Texts are as the metadata has them: a file's are decoded anew in each pass.
    """

    kind: str | None
    pre: str | None  # name of the cutting rule
    tokens: Collection[str]
    types: list[int]
    scores: list[float]
    merges: Collection[str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # every token that ends an answer, the file's own first
    adds_bos: bool | None  # None: the kind of tokenizer decides
    adds_eos: bool
    adds_space_prefix: bool


def read_vocabulary(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """Raises CorruptModelError for keys of the wrong type, length or range."""
    read = _Reader(metadata)
    tokens = read.texts("tokens")
    types = read.items("token_type", int) or [NORMAL] * len(tokens)
    scores = read.items("scores", float)
    for name, values in (("token_type", types), ("scores", scores or tokens)):
        if len(values) != len(tokens):
            raise CorruptModelError(f"{len(tokens)} tokens but {len(values)} values in {_PREFIX}{name}")
    named_ends = [read.token_id(word, len(tokens)) for word in ("eos", "eot", "eom")]
    marked = enumerate(zip(types, tokens, strict=True))
    known_ends = [i for i, (kind, text) in marked if kind == CONTROL and text in _END_TEXTS]
    return GGUFVocabulary(
        kind=read.text("model"),
        pre=read.text("pre"),
        tokens=tokens,
        types=types,
        scores=scores,
        merges=read.texts("merges"),
        bos_token_id=read.token_id("bos", len(tokens)),
        eos_token_ids=tuple(dict.fromkeys(i for i in named_ends + known_ends if i is not None)),
        adds_bos=read.flag("add_bos_token"),
        adds_eos=bool(read.flag("add_eos_token")),
        adds_space_prefix=read.flag("add_space_prefix") is not False,
    )


def chat_template(metadata: Mapping[str, Any]) -> str | None:
    """The source of the chat template, if the file has one."""
    template = metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


class _Reader:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def items(self, name: str, kind: type) -> list[Any]:
        values = self._metadata.get(_PREFIX + name, [])
        if not isinstance(values, list) or not set(map(type, values)) <= {kind}:
            raise CorruptModelError(f"{_PREFIX}{name} is not a list of {kind.__name__}")
        return values

    def texts(self, name: str) -> Collection[str]:
        values = self._metadata.get(_PREFIX + name, [])
        if isinstance(values, list | str) or not isinstance(values, Collection):
            return self.items(name, str)
        return values  # texts of the file, decoded as they are asked for

    def text(self, name: str) -> str | None:
        value = self._metadata.get(_PREFIX + name)
        return value if isinstance(value, str) else None

    def flag(self, name: str) -> bool | None:
        value = self._metadata.get(_PREFIX + name)
        return None if value is None else bool(value)

    def token_id(self, word: str, num_tokens: int) -> int | None:
        """Without a vocabulary in the file, any id is taken."""
        value = self._metadata.get(f"{_PREFIX}{word}_token_id")
        if value is None or (isinstance(value, int) and 0 <= value < (num_tokens or 1 << 32)):
            return value
        raise CorruptModelError(f"{_PREFIX}{word}_token_id is {value!r}; there are {num_tokens} tokens")

"""Build a Tokenizer from the metadata of a GGUF file. Two kinds exist: byte-level BPE and SentencePiece BPE.

tokenizer.ggml.model   "gpt2": tokens + merges, cut by pretokenizers.py      "llama": tokens + scores
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import CorruptModelError, UnsupportedModelError
from octavo.text.pretokenizers import PreTokenizer, pre_tokenizer
from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary_gguf import CONTROL, NORMAL, USER_DEFINED, GGUFVocabulary, read_vocabulary

_SPACE_MARK = "▁"


class _Merges(Sequence[tuple[str, str]]):
    """Pairs made as the library comes to them: the memory of a list of them all would stay Python's.

    The library takes nothing but a Sequence, reserves `expected` places and walks it once.
    """

    def __init__(self, pairs: Iterator[tuple[str, str]], expected: int) -> None:
        self._pairs = pairs
        self._expected = expected

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self._pairs

    def __len__(self) -> int:
        return self._expected

    def __getitem__(self, index: Any) -> Any:
        raise IndexError(index)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises CorruptModelError without a usable vocabulary, UnsupportedModelError for other kinds."""
    vocabulary = read_vocabulary(metadata)
    if not vocabulary.tokens:
        raise CorruptModelError(
            "the file has no tokenizer.ggml.tokens; use a file that contains its vocabulary"
        )
    if vocabulary.kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"tokenizer kind {vocabulary.kind!r} is not supported; gpt2 and llama are"
        )
    tokens = list(vocabulary.tokens)
    ids = {tokens[i]: i for i in reversed(range(len(tokens)))}  # the first of two equal texts keeps its id
    try:
        if vocabulary.kind == "gpt2":
            rules = pre_tokenizer(vocabulary.pre)
            backend, adds_bos = _byte_level(ids, vocabulary.merges, rules), rules.adds_bos
        else:
            backend, adds_bos = _sentence_piece(ids, vocabulary), True
        _add_special_tokens(backend, tokens, vocabulary.types)
        _add_template(backend, vocabulary, tokens, adds_bos)
    except CorruptModelError:
        raise
    except Exception as error:  # the library raises plain Exception, as for merges outside the vocabulary
        raise CorruptModelError(f"the tokenizer of the file cannot be built: {error}") from error
    return Tokenizer(backend, bos_token_id=vocabulary.bos_token_id, eos_token_ids=vocabulary.eos_token_ids)


def _byte_level(ids: dict[str, int], merges: Collection[str], rules: PreTokenizer) -> tokenizers.Tokenizer:
    pairs = ((left, right) for left, _, right in (merge.partition(" ") for merge in merges))
    model = models.BPE(ids, _Merges(pairs, len(merges)), ignore_merges=rules.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(ids: dict[str, int], vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    if not vocabulary.scores:
        raise CorruptModelError("the file has no tokenizer.ggml.scores, which its kind of tokenizer needs")
    types = vocabulary.types
    # Control and byte tokens are never the result of joining: "<0x0A>" typed out stays six characters.
    joinable = {text: i for text, i in ids.items() if types[i] in (NORMAL, USER_DEFINED)}
    unknown = next((text for text, i in ids.items() if types[i] == 2), None)
    model = models.BPE(
        ids,
        _Merges(merges_by_score(joinable, vocabulary.scores), len(ids)),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback="<0x00>" in ids,
    )
    backend = tokenizers.Tokenizer(model)
    escape = normalizers.Replace(" ", _SPACE_MARK)
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.adds_space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), escape])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = escape
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_by_score(ids: Mapping[str, int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union scores best; as ranked merges, that is every split
    of every token into two tokens, best union first."""
    text_of = {i: text for text, i in ids.items()}  # the merges share the vocabulary's strings
    for token_id in sorted(text_of, key=lambda i: (-scores[i], i)):
        text = text_of[token_id]
        pairs = [
            (left, right)
            for cut in range(1, len(text))
            if (left := ids.get(text[:cut])) is not None and (right := ids.get(text[cut:])) is not None
        ]
        yield from ((text_of[left], text_of[right]) for left, right in sorted(pairs))


def _add_special_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control and user-defined tokens are found in the text before it is cut."""
    control = [tokens[i] for i, kind in enumerate(types) if kind == CONTROL]
    user = [tokens[i] for i, kind in enumerate(types) if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in user])


def _add_template(
    backend: tokenizers.Tokenizer, vocabulary: GGUFVocabulary, tokens: list[str], adds_bos: bool
) -> None:
    """Start and end tokens around a plain text, where the file asks for them."""
    if vocabulary.adds_bos is not None:
        adds_bos = vocabulary.adds_bos
    starts = [vocabulary.bos_token_id] if adds_bos and vocabulary.bos_token_id is not None else []
    ends = list(vocabulary.eos_token_ids[:1]) if vocabulary.adds_eos else []
    if not starts and not ends:
        return
    # Given as (text, id) pairs; the template refers to them by text.
    text = {i: tokens[i] for i in starts + ends}
    template = [*(text[i] for i in starts), "$A", *(text[i] for i in ends)]
    special = [(content, i) for i, content in text.items()]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)

"""Build a Tokenizer from the metadata of a GGUF file. Two kinds exist: byte-level BPE and SentencePiece BPE.

tokenizer.ggml.model   "gpt2": tokens + merges, cut by pretokenizers.py      "llama": tokens + scores
token type             1 normal  2 unknown  3 control  4 user defined  5 unused  6 byte
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import CorruptModelError, UnsupportedModelError
from octavo.text.pretokenizers import PreTokenizer, pre_tokenizer
from octavo.text.tokenizer import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE_MARK = "▁"


def tokenizer_from_gguf(metadata: Mapping[str, Any], eos_token_ids: Sequence[int]) -> Tokenizer:
    """Raises CorruptModelError without a usable vocabulary, UnsupportedModelError for other kinds."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CorruptModelError(
            "the file has no tokenizer.ggml.tokens; use a file that contains its vocabulary"
        )
    # The first of two equal texts keeps its id, as in the vocabularies these files are made from.
    vocab = {text: i for i, text in reversed(list(enumerate(tokens)))}
    try:
        if kind == "gpt2":
            rules = pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
            backend, adds_bos = _byte_level(metadata, vocab, rules), rules.adds_bos
        elif kind == "llama":
            backend, adds_bos = _sentence_piece(metadata, tokens, vocab), True
        else:
            raise UnsupportedModelError(f"tokenizer kind {kind!r} is not supported; gpt2 and llama are")
    except UnsupportedModelError:
        raise
    except Exception as error:  # the library raises plain Exception for merges outside the vocabulary
        raise CorruptModelError(f"the tokenizer of the file cannot be built: {error}") from error
    _add_special_tokens(backend, metadata, tokens)
    bos_token_id = metadata.get("tokenizer.ggml.bos_token_id")
    _add_template(backend, metadata, tokens, adds_bos)
    return Tokenizer(backend, bos_token_id=bos_token_id, eos_token_ids=eos_token_ids)


def _byte_level(
    metadata: Mapping[str, Any], vocab: dict[str, int], rules: PreTokenizer
) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=rules.ignore_merges))
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(
    metadata: Mapping[str, Any], tokens: list[str], vocab: dict[str, int]
) -> tokenizers.Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise CorruptModelError(f"{len(tokens)} tokens but {len(scores)} scores")
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    # Control and byte tokens are never the result of joining: "<0x0A>" typed out stays six characters.
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    joinable = {text: i for text, i in vocab.items() if types[i] in (_NORMAL, _USER_DEFINED)}
    model = models.BPE(
        vocab,
        merges_by_score(joinable, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback="<0x00>" in vocab,
    )
    backend = tokenizers.Tokenizer(model)
    escape = normalizers.Replace(" ", _SPACE_MARK)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), escape]) if prefix else escape
    )
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_by_score(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union scores best; as ranked merges, that is every split
    of every token into two tokens, best union first."""
    ranked = []
    for text, token_id in vocab.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], token_id, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_special_tokens(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str]
) -> None:
    """Control and user-defined tokens are found in the text before it is cut."""
    types = metadata.get("tokenizer.ggml.token_type", [])
    marked = [(kind, tokens[i]) for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
    control = [AddedToken(t, special=True, normalized=False) for kind, t in marked if kind == _CONTROL]
    user = [AddedToken(t, special=False, normalized=False) for kind, t in marked if kind == _USER_DEFINED]
    backend.add_special_tokens(control)
    backend.add_tokens(user)


def _add_template(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str], adds_bos: bool
) -> None:
    """Start and end tokens around a plain text, where the file asks for them."""
    bos, eos = (metadata.get(f"tokenizer.ggml.{word}_token_id") for word in ("bos", "eos"))
    starts = [bos] if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else []
    ends = [eos] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if not starts and not ends:
        return
    # Given as (text, id) pairs; the template refers to them by text.
    template = [tokens[i] for i in starts] + ["$A"] + [tokens[i] for i in ends]
    special = list({tokens[i]: i for i in starts + ends}.items())
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)

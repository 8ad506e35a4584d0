"""How texts are cut before byte pairs are merged, by the names that GGUF files give to the rules.

A pattern cuts out every match as a piece of its own and leaves what lies between; several apply in turn.
The patterns are the published ones of the model families (the `pre_tokenizer` of their tokenizer.json).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

log = logging.getLogger(__name__)

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PUNCTUATION_OR_WORD = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Letters with case, in the scripts that the published pattern lists; hexadecimal, since some of these
# characters do not survive being normalised by an editor.
_CASED_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A "
    "38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF "
    "1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D "
    "1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 "
    "1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F "
    "2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F "
    "A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)


def _char_class(ranges: str) -> str:
    """'41-5A B5' -> a character class of code points."""
    ends = (word.split("-") for word in ranges.split())
    return "[" + "".join("-".join(rf"\x{{{end}}}" for end in pair) for pair in ends) + "]"


def _cased_words(suffix: str, digits: str) -> str:
    """Words cut where a capital follows a small letter."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return f"{head}{_UPPER}*{_LOWER}+{suffix}|{head}{_UPPER}+{_LOWER}*{suffix}|{digits}{_CASED_TAIL}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is taken whole
    nfc: bool = False  # the text is brought to NFC first
    adds_bos: bool = False  # unless the file says otherwise


_GPT2 = PreTokenizer((_GPT2_SPLIT,))
_GPT2_DIGITS = PreTokenizer((_DIGIT, _GPT2_SPLIT))
_LLAMA3 = PreTokenizer((_CONTRACTION + _WORD + r"|\p{N}{1,3}" + _TAIL,), ignore_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer((_CONTRACTION + _WORD + r"|\p{N}" + _TAIL,), nfc=True)
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"))
_DEEPSEEK_LLM = PreTokenizer(
    (
        r"[\r\n]",
        rf"\s?{_char_class(_CASED_LETTERS)}+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+",
        _DIGIT,
    )
)
_DEEPSEEK_CODER = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _DIGIT))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _PUNCTUATION_OR_WORD))
_TEKKEN = PreTokenizer((_cased_words("", r"\p{N}"),), ignore_merges=True, adds_bos=True)
_GPT4O = PreTokenizer((_cased_words(_CONTRACTION + "?", r"\p{N}{1,3}"),))

_BY_NAME = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "command-r": _GPT2_DIGITS,
    "codeshell": _GPT2_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": replace(_LLAMA3, ignore_merges=False, adds_bos=False),
    "dbrx": replace(_LLAMA3, ignore_merges=False, adds_bos=False),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "stablelm2": replace(_QWEN2, nfc=False),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """The rules of this name; GPT-2's, with a warning in the log, if it is not known."""
    if name is None:
        name = "default"
    found = _BY_NAME.get(name)
    if found is None:
        log.warning(
            "pre-tokenizer %r is not known; using gpt-2's, so some texts may be cut differently", name
        )
        return _GPT2
    return found

"""Tokenizers from tokenizer.json, with what tokenizer_config.json adds."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import CorruptModelError, ModelNotFoundError
from octavo.text.tokenizer import TokenForm
from octavo.text.tokenizer_hf import tokenizer_from_folder


def backend() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return built


def save(folder, built, **config) -> None:
    built.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_byte_level_file_reads_and_writes_any_text(tmp_path):
    save(tmp_path, backend())
    tokenizer = tokenizer_from_folder(tmp_path)
    ids = tokenizer.encode("naïve 🎉</s>")
    assert tokenizer.decode(ids) == "naïve 🎉"
    assert ids[-1] == 257
    assert tokenizer.form is TokenForm.BYTE_LEVEL
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())


def test_start_and_end_tokens_come_from_the_configuration_unless_given(tmp_path):
    save(tmp_path, backend(), bos_token={"content": "<s>"}, eos_token="</s>")
    tokenizer = tokenizer_from_folder(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, (257,))
    tokenizer = tokenizer_from_folder(tmp_path, 5, (6, 7))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (5, (6, 7))


def test_add_bos_token_and_add_eos_token_count_without_a_rule_in_the_file(tmp_path):
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    save(tmp_path, backend(), add_bos_token=True, add_eos_token=True, **tokens)
    tokenizer = tokenizer_from_folder(tmp_path)
    ids = tokenizer.encode("a")
    assert (ids[0], ids[-1], len(ids)) == (256, 257, 3)
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1


def test_a_rule_in_the_file_is_not_doubled(tmp_path):
    built = backend()
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    save(tmp_path, built, add_bos_token=True, bos_token="<s>")
    assert tokenizer_from_folder(tmp_path).encode("a")[:2] != [256, 256]
    assert tokenizer_from_folder(tmp_path).encode("a")[0] == 256


def test_truncation_and_padding_left_by_training_are_off(tmp_path):
    built = backend()
    built.enable_truncation(4)
    built.enable_padding(length=8)
    save(tmp_path, built)
    assert len(tokenizer_from_folder(tmp_path).encode("abcdefghij")) == 10
    assert len(tokenizer_from_folder(tmp_path).encode("a")) == 1


def test_a_sentencepiece_file_is_recognised_by_its_decoder(tmp_path):
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "<0xC3>": 4, "<0xA9>": 5}
    built = tokenizers.Tokenizer(
        models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    save(tmp_path, built)
    tokenizer = tokenizer_from_folder(tmp_path)
    ids = tokenizer.encode("a é")
    assert ids == [3, 1, 4, 5]
    assert [tokenizer.token_bytes(i) for i in ids] == [b" a", b" ", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "a é"
    assert tokenizer.form is TokenForm.SENTENCE_PIECE
    assert tokenizer.drops_first_space


def test_a_missing_or_damaged_file_is_a_model_error(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptModelError, match=r"tokenizer\.json: cannot be read"):
        tokenizer_from_folder(tmp_path)
    save(tmp_path, backend())
    (tmp_path / "tokenizer_config.json").write_text("not json")
    with pytest.raises(CorruptModelError, match="cannot be read"):
        tokenizer_from_folder(tmp_path)

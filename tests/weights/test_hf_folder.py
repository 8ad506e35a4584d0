"""Hugging Face folders as checkpoints: one file or several, templates, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from octavo.errors import CorruptModelError, ModelError, ModelNotFoundError, UnsupportedModelError
from octavo.weights.loader import open_checkpoint, open_texts
from octavo.weights.names_hf import hf_name


def test_tensors_and_configuration_are_read(tiny, tmp_path):
    tensors = tiny.tensors(tiny.config())
    checkpoint = open_checkpoint(tiny.write_folder(tmp_path, tiny.hf_json(), tensors))
    assert checkpoint.config == tiny.config(bos_token_id=0, eos_token_ids=(1,))
    assert checkpoint.num_bytes == sum(values.nbytes for values in tensors.values())
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values, err_msg=name)


def test_a_tied_head_is_not_expected(tiny, tmp_path):
    config = tiny.config(tie_embeddings=True)
    folder = tiny.write_folder(tmp_path, tiny.hf_json(tie_word_embeddings=True), tiny.tensors(config))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.tie_embeddings
    assert not checkpoint.has("lm_head")
    with pytest.raises(ModelError, match=r"no tensor 'lm_head' \(looked for 'lm_head.weight'\)"):
        checkpoint.tensor("lm_head")


def write_sharded(tiny, folder):
    tensors = {hf_name(n): v for n, v in tiny.tensors(tiny.config()).items()}
    names = sorted(tensors)
    weight_map = {}
    for part, chosen in enumerate((names[:7], names[7:]), 1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({n: tensors[n] for n in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(tiny.hf_json()))


def test_a_sharded_checkpoint_is_read_through_its_index(tiny, tmp_path):
    write_sharded(tiny, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for name, values in tiny.tensors(tiny.config()).items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values, err_msg=name)


def test_a_missing_shard_is_named(tiny, tmp_path):
    write_sharded(tiny, tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="model-00002-of-00002.safetensors is missing"):
        open_checkpoint(tmp_path)


def test_an_index_cannot_name_files_outside_the_folder(tiny, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../outside.safetensors"}}')
    (folder / "config.json").write_text(json.dumps(tiny.hf_json()))
    with pytest.raises(ModelNotFoundError, match="outside.safetensors is missing"):
        open_checkpoint(folder)


def test_pickled_weights_are_never_loaded(tiny, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.hf_json()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}.")
    with pytest.raises(UnsupportedModelError, match=r"only pytorch_model\.bin.*never loaded"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights_or_configuration_says_what_is_missing(tiny, tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.hf_json()))
    with pytest.raises(ModelNotFoundError, match=r"no model\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_damaged_config_is_corrupt(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptModelError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_a_missing_tensor_and_a_wrong_shape_are_named(tiny, tmp_path):
    tensors = tiny.tensors(tiny.config())
    del tensors["layers.1.post_norm"]
    with pytest.raises(CorruptModelError, match=r"'layers\.1\.post_norm' is missing \(shape \[32\]\)"):
        open_checkpoint(tiny.write_folder(tmp_path / "a", tiny.hf_json(), tensors))
    tensors = tiny.tensors(tiny.config())
    with pytest.raises(CorruptModelError, match=r"'layers\.0\.gate' has shape \[64, 32\].*\[96, 32\]"):
        open_checkpoint(tiny.write_folder(tmp_path / "b", tiny.hf_json(intermediate_size=96), tensors))


def test_chat_template_comes_from_its_own_file_first(tiny, tmp_path):
    folder = tiny.write_folder(tmp_path, tiny.hf_json(), tiny.tensors(tiny.config()))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert checkpoint.chat_template == "D"
    (folder / "tokenizer_config.json").write_text('{"chat_template": "plain"}')
    assert checkpoint.chat_template == "plain"
    (folder / "chat_template.jinja").write_text("file")
    assert checkpoint.chat_template == "file"


def test_tokenizer_carries_the_model_s_end_tokens(tiny, tmp_path):
    folder = tiny.write_folder(tmp_path, tiny.hf_json(), tiny.tensors(tiny.config()))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = open_checkpoint(folder).tokenizer()
    assert tokenizer.encode("c b") == [2, 1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1, 2))
    (folder / "chat_template.jinja").write_text("file")
    tokenizer, template = open_texts(folder)
    assert (tokenizer.eos_token_ids, template) == ((1, 2), "file")

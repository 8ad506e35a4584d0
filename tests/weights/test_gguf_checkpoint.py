"""GGUF files as checkpoints: names, row order, configuration and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from octavo.errors import CorruptModelError, ModelError, ModelNotFoundError, UnsupportedModelError
from octavo.models.config import RopeConfig
from octavo.weights.config_gguf import gguf_name
from octavo.weights.loader import open_checkpoint, open_texts


def test_llama_tensors_come_back_in_half_split_order(tiny, tmp_path):
    checkpoint = open_checkpoint(tiny.llama_gguf(tmp_path / "m.gguf"))
    for name, values in tiny.tensors(tiny.config()).items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values, err_msg=name)


def test_llama_configuration_is_read(tiny, tmp_path):
    checkpoint = open_checkpoint(tiny.llama_gguf(tmp_path / "m.gguf", **{"llama.rope.freq_base": 5e5}))
    assert checkpoint.config == tiny.config(
        rope=RopeConfig(theta=500000.0), bos_token_id=0, eos_token_ids=(1,)
    )
    assert checkpoint.num_bytes == sum(v.nbytes for v in tiny.tensors(tiny.config()).values())
    assert checkpoint.chat_template is None
    assert checkpoint.path == tmp_path / "m.gguf"


def test_chat_template_is_the_one_in_the_file(tiny, tmp_path):
    path = tiny.llama_gguf(tmp_path / "m.gguf", **{"tokenizer.chat_template": "{{ messages }}"})
    assert open_checkpoint(path).chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("arch", "changes"),
    [("qwen2", {"attention_bias": True}), ("qwen3", {"qk_norm": True}), ("qwen2", {"tie_embeddings": True})],
)
def test_qwen_rows_are_taken_as_they_are(tiny, tmp_path, arch, changes):
    config = tiny.config(model_type=arch, **changes)
    tensors = tiny.tensors(config)
    stored = {gguf_name(name): values for name, values in tensors.items()}
    path = tiny.write_gguf(tmp_path / "m.gguf", arch, tiny.metadata(config, arch), stored)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.model_type == arch
    for field, value in changes.items():
        assert getattr(checkpoint.config, field) is value
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values, err_msg=name)
    assert checkpoint.has("lm_head") is not config.tie_embeddings


def test_llama_biases_are_reordered_with_their_rows(tiny, tmp_path):
    config = tiny.config(attention_bias=True, num_layers=1)
    tensors = tiny.tensors(config)
    stored = tiny.as_llama_gguf(config, tensors)
    # The writers of these files permute the biases like the rows they belong to.
    for leaf, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        rows = tensors[f"layers.0.{leaf}.bias"].reshape(heads, 2, config.head_size // 2)
        stored[gguf_name(f"layers.0.{leaf}.bias")] = rows.swapaxes(1, 2).reshape(-1).copy()
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tiny.metadata(config), stored)
    checkpoint = open_checkpoint(path)
    for leaf in ("q.bias", "k.bias", "v.bias"):
        np.testing.assert_array_equal(checkpoint.tensor(f"layers.0.{leaf}"), tensors[f"layers.0.{leaf}"])


def test_rope_frequency_factors_become_part_of_the_configuration(tiny, tmp_path):
    config = tiny.config()
    stored = tiny.as_llama_gguf(config, tiny.tensors(config))
    stored["rope_freqs.weight"] = np.array([1.0, 1.0, 2.5, 8.0], np.float32)
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tiny.metadata(config), stored)
    assert open_checkpoint(path).config.rope == RopeConfig(factors=(1.0, 1.0, 2.5, 8.0))


def test_linear_and_yarn_scaling_are_read(tiny, tmp_path):
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = tiny.llama_gguf(tmp_path / "linear.gguf", **linear)
    assert open_checkpoint(path).config.rope == RopeConfig(kind="linear", factor=4.0)
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.rope.scaling.attn_factor": 2.0,
    }
    rope = open_checkpoint(tiny.llama_gguf(tmp_path / "yarn.gguf", **yarn)).config.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
    assert rope.attention_factor == pytest.approx(2.0 * (0.1 * math.log(4.0) + 1.0))


def test_unknown_rope_scaling_is_refused(tiny, tmp_path):
    extra = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}
    with pytest.raises(UnsupportedModelError, match="rope scaling 'longrope'"):
        open_checkpoint(tiny.llama_gguf(tmp_path / "m.gguf", **extra))


def test_end_tokens_are_the_file_s_own_and_the_well_known_ones(tiny, tmp_path):
    config = tiny.config()
    metadata = tiny.metadata(config)
    tokens = ["<s>", "</s>", "<unk>", "<|im_end|>", "<|eot_id|>", *"abcdefghijk"]
    types = [3, 3, 2, 3, 1] + [1] * 11  # <|eot_id|> is an ordinary word here
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    metadata["tokenizer.ggml.eot_token_id"] = 5
    path = tiny.write_gguf(
        tmp_path / "m.gguf", "llama", metadata, tiny.as_llama_gguf(config, tiny.tensors(config))
    )
    assert open_checkpoint(path).config.eos_token_ids == (1, 5, 3)


def test_unsupported_architecture_lists_the_supported_ones(tiny, tmp_path):
    path = tiny.write_gguf(tmp_path / "m.gguf", "rwkv7", {}, {"w": np.zeros((1, 32), np.float32)})
    with pytest.raises(
        UnsupportedModelError, match="architecture 'rwkv7' is not supported.*llama, gemma2, gemma3, qwen2"
    ):
        open_checkpoint(path)


def test_mixture_of_experts_is_refused(tiny, tmp_path):
    with pytest.raises(UnsupportedModelError, match="mixture-of-experts"):
        open_checkpoint(tiny.llama_gguf(tmp_path / "m.gguf", **{"llama.expert_count": 8}))


def test_a_missing_tensor_is_named_when_the_file_is_opened(tiny, tmp_path):
    config = tiny.config()
    stored = tiny.as_llama_gguf(config, tiny.tensors(config))
    del stored["blk.1.ffn_up.weight"]
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tiny.metadata(config), stored)
    with pytest.raises(CorruptModelError, match=r"'layers\.1\.up' is missing \(shape \[64, 32\]\)"):
        open_checkpoint(path)


def test_a_misshapen_tensor_is_named_with_both_shapes(tiny, tmp_path):
    config = tiny.config()
    stored = tiny.as_llama_gguf(config, tiny.tensors(config))
    stored["blk.0.attn_v.weight"] = np.zeros((8, 32), np.float32)
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", tiny.metadata(config), stored)
    with pytest.raises(CorruptModelError, match=r"'layers\.0\.v' has shape \[8, 32\].* \[16, 32\]"):
        open_checkpoint(path)


@pytest.mark.parametrize("value", ["many", 0, 2.5])
def test_a_mistyped_number_is_named(tiny, tmp_path, value):
    with pytest.raises(CorruptModelError, match=r"llama\.block_count is"):
        open_checkpoint(tiny.llama_gguf(tmp_path / "m.gguf", **{"llama.block_count": value}))


def test_more_layers_than_stored_are_refused_without_listing_them_all(tiny, tmp_path):
    path = tiny.llama_gguf(tmp_path / "a.gguf", **{"llama.block_count": (1 << 32) - 1})
    with pytest.raises(CorruptModelError, match="4294967295 layers, but only 21 tensors"):
        open_checkpoint(path)
    path = tiny.llama_gguf(tmp_path / "b.gguf", **{"llama.block_count": 3})
    with pytest.raises(CorruptModelError, match=r"'layers\.2\.input_norm' is missing"):
        open_checkpoint(path)


def test_an_unknown_tensor_is_a_model_error(tiny, tmp_path):
    checkpoint = open_checkpoint(tiny.llama_gguf(tmp_path / "m.gguf"))
    assert not checkpoint.has("layers.0.q.bias")
    with pytest.raises(ModelError, match=r"no tensor 'layers\.0\.q\.bias'"):
        checkpoint.tensor("layers.0.q.bias")


def split_model(tiny, folder):
    """The tiny model in two files, as gguf-split leaves them."""
    config = tiny.config()
    stored = list(tiny.as_llama_gguf(config, tiny.tensors(config)).items())
    paths = [folder / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    first = {**tiny.metadata(config), "split.count": 2}
    tiny.write_gguf(paths[0], "llama", first, dict(stored[:5]))
    tiny.write_gguf(paths[1], "llama", {"split.count": 2}, dict(stored[5:]))
    return paths


@pytest.mark.parametrize("part", [0, 1])
def test_a_split_model_opens_by_any_of_its_parts(tiny, tmp_path, part):
    checkpoint = open_checkpoint(split_model(tiny, tmp_path)[part])
    for name, values in tiny.tensors(tiny.config()).items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values, err_msg=name)


def test_a_split_model_without_a_part_names_it(tiny, tmp_path):
    first, second = split_model(tiny, tmp_path)
    second.unlink()
    with pytest.raises(ModelNotFoundError, match=r"m-00002-of-00002\.gguf"):
        open_checkpoint(first)


def test_a_renamed_part_says_that_it_is_one(tiny, tmp_path):
    first, _ = split_model(tiny, tmp_path)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(CorruptModelError, match="one of 2 parts"):
        open_checkpoint(renamed)


def test_tokenizer_is_built_from_the_file(tiny, tmp_path):
    tokenizer = open_checkpoint(tiny.llama_gguf(tmp_path / "m.gguf")).tokenizer()
    assert tokenizer.encode("ab", add_special_tokens=False) == [2, 3, 4]  # '▁' is not in this vocabulary
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))


def test_texts_are_those_of_the_checkpoint(tiny, tmp_path):
    template = {"tokenizer.chat_template": "{{ messages }}"}
    path = tiny.llama_gguf(tmp_path / "m.gguf", **template)
    tokenizer, source = open_texts(path)
    assert source == "{{ messages }}"
    assert tokenizer.encode("ab", add_special_tokens=False) == [2, 3, 4]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))
    tokenizer, source = open_texts(split_model(tiny, tmp_path)[1])
    assert source is None
    assert tokenizer.encode("ab", add_special_tokens=False) == [2, 3, 4]


def test_texts_of_a_gguf_file_need_no_numpy(tiny, tmp_path):
    path = tiny.llama_gguf(tmp_path / "m.gguf")
    code = (
        "import sys, pathlib; from octavo.weights.loader import open_texts\n"
        f"open_texts(pathlib.Path({str(path)!r})); print('numpy' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_texts_are_refused_as_the_checkpoint_is(tiny, tmp_path):
    unknown = tiny.write_gguf(tmp_path / "m.gguf", "bert", {"tokenizer.ggml.model": "bert"}, {})
    renamed = split_model(tiny, tmp_path)[1].rename(tmp_path / "model.gguf")
    for path in (unknown, renamed, tmp_path / "no.gguf"):
        with pytest.raises(ModelError) as expected:
            open_checkpoint(path)
        with pytest.raises(ModelError) as found:
            open_texts(path)
        assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))


def test_paths_that_are_no_checkpoint_say_what_to_give(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        open_checkpoint(tmp_path / "no.gguf")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="give the folder it is in"):
        open_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.model
def test_the_default_model_opens_with_the_published_values(default_model_path):
    checkpoint = open_checkpoint(default_model_path)
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.tie_embeddings, config.rope) == (
        49152,
        True,
        RopeConfig(theta=100000.0),
    )
    assert (config.bos_token_id, config.eos_token_ids[0]) == (1, 2)
    assert checkpoint.chat_template is not None
    # Row 33 of q is the second half's first of head 0: stored as row 3. Values as transformers reads them.
    row = checkpoint.tensor("layers.0.q")[33]
    assert row.shape == (576,)
    np.testing.assert_array_equal(
        row, checkpoint._file_of["blk.0.attn_q.weight"].read("blk.0.attn_q.weight")[3]
    )

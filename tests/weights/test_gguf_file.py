"""The GGUF container: what is read equals what was written; damage is a CorruptModelError, never a crash."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import CorruptModelError, ModelError, ModelNotFoundError, UnsupportedModelError
from octavo.weights import gguf_file
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.gguf_header import _TYPES, read_header

QUANTISED = [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1]


def open_gguf(path: Path) -> GGUFFile:
    return GGUFFile(read_header(path))


def test_metadata_of_every_type_reads_as_written(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -2)
    writer.add_uint32("u32", 1 << 31)
    writer.add_int32("i32", -5)
    writer.add_uint64("u64", 1 << 63)
    writer.add_int64("i64", -(1 << 62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 🎉")
    writer.add_array("strings", ["a", "", "żółw"])
    writer.add_array("ints", [3, 1, 2])
    writer.add_array("nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = open_gguf(tmp_path / "m.gguf").metadata
    metadata["strings"] = list(metadata["strings"])
    assert metadata == {
        "general.architecture": "llama",
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -2,
        "u32": 1 << 31,
        "i32": -5,
        "u64": 1 << 63,
        "i64": -(1 << 62),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "naïve 🎉",
        "strings": ["a", "", "żółw"],
        "ints": [3, 1, 2],
        "nested": [[1, 2], [3]],
    }


def test_an_array_of_strings_is_decoded_in_each_pass_and_outlives_the_file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("strings", ["a", "", "żółw", "a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file = open_gguf(tmp_path / "m.gguf")
    strings = file.metadata["strings"]
    file.close()
    assert list(strings) == list(strings) == ["a", "", "żółw", "a"]
    assert len(strings) == 4
    assert "żółw" in strings
    assert "b" not in strings
    assert repr(strings) == "['a', '', 'żółw', 'a']"  # what error messages show


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 24, 7], ids="{}rows".format)
def test_a_quantised_tensor_reads_as_the_package_dequantises_it(tiny, tmp_path, kind, rows):
    values = np.random.default_rng(1).standard_normal((rows, 64)).astype(np.float32)
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", {}, {"w": values}, lambda name: kind)
    stored = gguf.quants.quantize(values, kind)
    found = open_gguf(path).read("w")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, gguf.quants.dequantize(stored, kind))


def test_a_tensor_dequantised_in_pieces_is_the_same(tiny, tmp_path, monkeypatch):
    values = np.random.default_rng(1).standard_normal((37, 64)).astype(np.float32)
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", {}, {"w": values}, lambda name: Q.Q8_0)
    whole = open_gguf(path).read("w")
    monkeypatch.setattr(gguf_file, "_DEQUANTIZE_BYTES", 3 * 68)  # bytes of a row: the last piece is shorter
    np.testing.assert_array_equal(open_gguf(path).read("w"), whole)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.F16])
def test_rows_are_read_as_they_are_asked_for(tiny, tmp_path, kind):
    values = np.random.default_rng(1).standard_normal((37, 64)).astype(np.float32)
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", {}, {"w": values}, lambda name: kind)
    rows, whole = open_gguf(path).rows("w"), open_gguf(path).read("w")
    assert rows.shape == (37, 64)
    for part in (slice(0, 16), slice(16, 37), slice(5, 6), slice(None)):
        np.testing.assert_array_equal(rows[part], whole[part])


def test_a_tensor_can_be_read_again_after_it_was_forgotten_and_views_stay_valid(tiny, tmp_path):
    values = np.random.default_rng(1).standard_normal((300, 64)).astype(np.float32)
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", {}, {"w": values, "v": values}, lambda name: Q.Q8_0)
    file = open_gguf(path)
    view, found = file.raw("w"), file.read("w")
    before = view.copy()
    file.forget("w")
    np.testing.assert_array_equal(view, before)
    np.testing.assert_array_equal(file.read("w"), found)
    np.testing.assert_array_equal(file.read("v"), found)


def test_row_order_picks_rows_of_the_file(tiny, tmp_path):
    values = np.arange(128, dtype=np.float32).reshape(4, 32)
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", {}, {"w": values}, lambda name: Q.Q8_0)
    file = open_gguf(path)
    np.testing.assert_array_equal(file.read("w", np.array([3, 0, 2, 1])), file.read("w")[[3, 0, 2, 1]])


def test_a_read_tensor_outlives_the_file(tiny, tmp_path):
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", {}, {"w": np.full((1, 32), 2.0, np.float32)})
    file = open_gguf(path)
    values = file.read("w")
    file.close()
    values[0, 0] = 3.0
    assert values.sum() == 65.0


def test_every_truncation_is_refused(tiny, tmp_path):
    config = tiny.config(num_layers=1)
    whole = tiny.llama_gguf(tmp_path / "m.gguf", config).read_bytes()
    end = max(t.start + t.num_bytes for t in open_gguf(tmp_path / "m.gguf").tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 1400, 7), *range(1400, end, 997), end - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptModelError, match="cut.gguf"):
            open_gguf(cut)


def test_a_truncated_tensor_is_named_with_both_ends(tiny, tmp_path):
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", {}, {"w": np.zeros((4, 32), np.float32)})
    end = open_gguf(path).tensors["w"].start + 512
    path.write_bytes(path.read_bytes()[: end - 3])
    with pytest.raises(CorruptModelError, match=f"tensor 'w' ends at byte {end}, the file at byte {end - 3}"):
        open_gguf(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 1500), value=st.integers(0, 255), width=st.sampled_from([1, 4, 8]))
def test_a_damaged_header_never_raises_anything_but_a_model_error(tiny, tmp_path, at, value, width):
    path = tmp_path / "m.gguf"
    if not path.exists():
        tiny.llama_gguf(path, tiny.config(num_layers=1))
    data = bytearray(path.read_bytes())
    data[at : at + width] = bytes([value]) * width
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    try:
        file = open_gguf(damaged)
    except ModelError:
        return
    assert isinstance(file, GGUFFile)


def test_another_file_is_not_a_gguf_file(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(CorruptModelError, match="not a GGUF file"):
        open_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("version", "hint"), [(1, "GGUF version 1 is"), (4, "GGUF version 4 is"), (3 << 24, "big-endian")]
)
def test_other_versions_are_refused_by_number(tmp_path, version, hint):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(UnsupportedModelError, match=hint):
        open_gguf(tmp_path / "m.gguf")


def test_a_huge_count_does_not_allocate(tmp_path):
    entry = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 60)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    with pytest.raises(CorruptModelError, match="array runs past the end"):
        open_gguf(tmp_path / "m.gguf")


def test_a_type_without_dequantiser_names_type_and_tensor(tiny, tmp_path):
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", {}, {"w": np.zeros((1, 32), np.int32)})
    with pytest.raises(UnsupportedModelError, match="tensor 'w' has type I32"):
        open_gguf(path).read("w")


def test_an_absent_file_is_not_found(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no\.gguf: cannot be read: No such file"):
        open_gguf(tmp_path / "no.gguf")


def test_block_sizes_are_those_of_the_gguf_package():
    """A type that it knows and we do not is refused by name, so the table may lag behind."""
    published = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert _TYPES.items() <= published.items()

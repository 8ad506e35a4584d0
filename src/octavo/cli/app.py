"""The list of subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli import blocks, chat, generate, models, serve, version

app = typer.Typer(
    help="Octavo serves language models and pages their KV cache.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("blocks")(blocks.blocks)
app.command("models")(models.models)
app.command("version")(version.version)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        version.version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())

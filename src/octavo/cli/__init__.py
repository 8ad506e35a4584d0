"""The `octavo` command. One file per subcommand; what they need is imported when they run, so that
`octavo --help` is quick. Every error is one line on standard error:

    exit code 0  done        1  it failed        2  wrong usage, configuration or request        130  Ctrl-C
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from octavo.errors import ConfigError, OctavoError, RequestError


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (default: sys.argv) and exit."""
    sys.exit(_run(sys.argv[1:] if arguments is None else list(arguments)))


def _run(arguments: list[str]) -> int:
    import typer

    from octavo.cli.app import app

    try:
        code = app(arguments, prog_name="octavo", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except OctavoError as error:
        return _fail(str(error), 2 if isinstance(error, ConfigError | RequestError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of a pipe went away: nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # Typer's own errors; which package their class lives in depends on its version.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "octavo"
        return _fail(f"{error.format_message().rstrip('.')}; see {command} --help", 2)


def _fail(message: str, code: int) -> int:
    print("octavo: error:", " ".join(message.split()), file=sys.stderr)
    return code

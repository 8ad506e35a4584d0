"""From the command to the first token, and the memory it takes: `octavo generate` in processes of its own.

    .venv/bin/python bench/startup.py [--rounds 3] [--weight-dtype int8]

With the packed weights read from the cache, and packed anew (--no-weight-cache). The best of the rounds: the files
are then in the system's cache, as they are on a machine that starts a model for the second time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from time import monotonic

COMMAND = (sys.executable, "-m", "octavo", "generate", "Hello", "--max-tokens", "8", "--temperature", "0")


@dataclass(frozen=True, slots=True)
class Start:
    first_token_s: float
    peak_mib: float  # resident memory


def start(*options: str) -> Start:
    """One run. Raises CalledProcessError."""
    began = monotonic()
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first_token_s = monotonic() - began
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, COMMAND)
    return Start(first_token_s, usage.ru_maxrss / 1024)


def measure(rounds: int, weight_dtype: str) -> dict[str, Start]:
    """The best of `rounds`, with and without the cache; a first run that fills it does not count."""
    options = ("--weight-dtype", weight_dtype)
    start(*options)
    modes = {"cached": options, "packed anew": (*options, "--no-weight-cache")}
    runs = {what: [start(*flags) for _ in range(rounds)] for what, flags in modes.items()}
    return {
        what: Start(min(run.first_token_s for run in found), min(run.peak_mib for run in found))
        for what, found in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weight-dtype", default="int8")
    args = parser.parse_args()
    for what, found in measure(args.rounds, args.weight_dtype).items():
        print(f"{what:12}  first token {found.first_token_s:.2f} s, peak {found.peak_mib:.0f} MiB resident")


if __name__ == "__main__":
    main()

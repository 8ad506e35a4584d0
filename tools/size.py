"""Size budgets: a file at most 500 lines, a function at most 80, at most 6 parameters. `make check` runs it.

Prints lines of code per folder, then everything over the hard limit; exits 1 if there is any. What is over
the soft limit (300 lines, 40 lines) is listed with --soft.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 500, 80, 6
SOFT_FILE, SOFT_FUNCTION = 300, 40
SUFFIXES = {".py", ".pyi", ".cpp", ".h", ".inl"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> Iterator[Path]:
    for folder in ("src", "csrc", "tools", "bench", "tests", "examples"):
        yield from (p for p in sorted((ROOT / folder).rglob("*")) if p.suffix in SUFFIXES)


def over_limits(path: Path, max_file: int, max_function: int) -> Iterator[str]:
    text = path.read_text()
    name = path.relative_to(ROOT)
    if (lines := text.count("\n")) > max_file:
        yield f"{name}: {lines} lines (at most {max_file})"
    if path.suffix != ".py" or name.parts[0] == "tests":
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > max_function:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines (at most {max_function})"
            yield from too_many_parameters(name, node)


def too_many_parameters(name: Path, node: Function) -> Iterator[str]:
    """Commands of the command line are exempt: there a parameter is a flag."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
    if len(names) > MAX_PARAMETERS and "cli" not in name.parts:
        yield f"{name}:{node.lineno}: {node.name} has {len(names)} parameters (at most {MAX_PARAMETERS})"


def main() -> int:
    soft = "--soft" in sys.argv[1:]
    per_folder: Counter[str] = Counter()
    problems: list[str] = []
    for path in sources():
        folder = "/".join(path.relative_to(ROOT).parts[:-1][:3])
        per_folder[folder] += path.read_text().count("\n")
        limits = (SOFT_FILE, SOFT_FUNCTION) if soft else (MAX_FILE, MAX_FUNCTION)
        problems += over_limits(path, *limits)
    for folder, lines in sorted(per_folder.items()):
        print(f"{lines:7,}  {folder}")
    print(f"{sum(per_folder.values()):7,}  in all")
    print("\n".join(problems))
    return 1 if problems and not soft else 0


if __name__ == "__main__":
    sys.exit(main())

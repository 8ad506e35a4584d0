"""The import rule: who may know whom. Read from the source, so an import inside a function counts too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src" / "octavo"

# folder → the octavo packages it may import, besides itself and errors
ALLOWED = {
    "core": set(),
    "sched": {"core"},
    "backends": {"core", "_native"},
    "models": {"core", "backends"},
    "sampling": {"core"},
    "text": {"core", "sampling", "engine.messages"},
    "weights": {"models", "text", "config"},
    "metrics": {"core.delta", "engine.messages"},
    "engine": {"core", "sched", "backends", "models", "sampling", "text", "weights", "metrics", "config"},
    "server": {"engine", "text", "metrics", "config", "core", "sampling", "weights"},
    "cli": {"server", "engine", "text", "weights", "models", "config", "core", "metrics"},
}
STDLIB_ONLY = {"core", "sched"}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            if node.module == "octavo":
                yield from (f"octavo.{alias.name}" for alias in node.names)
            else:
                yield node.module


def is_allowed(folder: str, module: str) -> bool:
    inner = module.removeprefix("octavo.")
    allowed = ALLOWED[folder] | {folder, "errors", "__version__"}
    return any(inner == a or inner.startswith(a + ".") for a in allowed)


def test_every_folder_has_a_rule():
    folders = {p.name for p in SRC.iterdir() if p.is_dir() and not p.name.startswith("__")}
    assert folders == set(ALLOWED)


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_folder_imports_only_what_it_may_know(folder):
    wrong = [
        f"{path.relative_to(SRC)} imports {module}"
        for path in sorted((SRC / folder).rglob("*.py"))
        for module in imports_of(path)
        if module.startswith("octavo") and not is_allowed(folder, module)
    ]
    assert not wrong


@pytest.mark.parametrize("folder", sorted(STDLIB_ONLY))
def test_core_and_sched_import_only_the_standard_library(folder):
    outside = [
        f"{path.relative_to(SRC)} imports {module}"
        for path in sorted((SRC / folder).rglob("*.py"))
        for module in imports_of(path)
        if module.split(".")[0] not in sys.stdlib_module_names | {"octavo"}
    ]
    assert not outside


def test_importing_core_and_sched_loads_nothing_but_the_standard_library():
    code = (
        "import sys; before = set(sys.modules); import octavo.core.kv_manager, octavo.sched.scheduler\n"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['octavo']"


@pytest.mark.parametrize(("folder", "forbidden"), [("core", "time"), ("sched", "time"), ("core", "logging")])
def test_pure_folders_have_no_clock_and_no_log(folder, forbidden):
    for path in (SRC / folder).rglob("*.py"):
        assert forbidden not in set(imports_of(path)), path

"""How measurements are kept and shown: rows beside the machine's limits, tables, JSON in build/bench/."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import strftime
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "bench"
MIN_WIDTH = 150  # columns of a table, also where output goes to a file


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement and the best that the machine's limits allow for it, in the same unit."""

    what: str
    value: float
    unit: str  # "…/s": more is better, else less is
    limit: float | None = None
    more: Mapping[str, float] = field(default_factory=dict)  # further figures, named with their unit

    @property
    def share(self) -> float | None:
        """How near the limit, 0 to 1."""
        if self.limit is None:
            return None
        return self.value / self.limit if self.unit.endswith("/s") else self.limit / self.value


def show(title: str, rows: Sequence[Row]) -> None:
    table = Table("", "measured", "limit", "share", "", title=title, title_justify="left")
    for row in rows:
        more = ", ".join(f"{name} {number(value)}" for name, value in row.more.items())
        limit = "" if row.limit is None else number(row.limit)
        share = "" if row.share is None else f"{row.share:.0%}"
        table.add_row(row.what, f"{number(row.value)} {row.unit}", limit, share, more)
    console = Console()
    Console(width=max(console.width, MIN_WIDTH)).print(table)


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def model_name(name: str) -> str:
    """The folder of a model's results, from what --model was given."""
    return Path(name).stem if name else "smollm2"


def save(model: str, section: str, flags: Mapping[str, Any], rows: Sequence[Row]) -> None:
    path = FOLDER / model / f"{section}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "machine": machine(),
        "flags": dict(flags),
        "rows": [asdict(r) | {"share": r.share} for r in rows],
    }
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written to {path.relative_to(ROOT)}", flush=True)


def load(model: str, section: str) -> dict[str, Any]:
    """What save() wrote. Raises FileNotFoundError."""
    found: dict[str, Any] = json.loads((FOLDER / model / f"{section}.json").read_text())
    return found


def machine() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    families = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("cpu family", "model\t"))]
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": models[0] if models else platform.machine(),
        "family, model": ", ".join(families[:2]),
        "cpus": str(len(models) or 1),
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "date": strftime("%Y-%m-%d %H:%M"),
    }

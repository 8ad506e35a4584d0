"""Draws docs/images/performance.svg from what bench/run.py and bench/peers.py wrote.

.venv/bin/python bench/plot.py [--model smollm2]
"""

from __future__ import annotations

import argparse
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from report import ROOT, load, model_name

PICTURE = ROOT / "docs" / "images" / "performance.svg"
Points = list[tuple[float, dict[str, Any]]]


def points(found: dict[str, Any], prefix: str) -> Points:
    """(number, row) of the rows named `prefix` and a number."""
    rows = [
        (row["what"].removeprefix(prefix), row) for row in found["rows"] if row["what"].startswith(prefix)
    ]
    return [(float(rest), row) for rest, row in rows if rest.isdigit()]


def line(axes: Axes, found: Points, key: str, label: str, style: str = "o-") -> None:
    values = [(x, row["more"].get(key, row.get(key))) for x, row in found]
    known = [(x, y) for x, y in values if y is not None]
    if known:
        axes.plot(*zip(*known, strict=True), style, label=label, markersize=4)


def finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)


def throughput(axes: Axes, model: str) -> None:
    engine, peers = points(load(model, "engine"), "serve, c="), points(load(model, "peers"), "serve, c=")
    line(axes, engine, "value", "Octavo, in process")
    line(axes, engine, "limit", "the machine's limit", "k--")
    line(axes, peers, "value", "Octavo, HTTP")
    for name in ("OpenVINO GenAI", "llama.cpp"):
        line(axes, peers, name, name, "s-")
    finish(axes, "Output", "requests at a time", "output tokens/s")


def step_time(axes: Axes, found: Points, title: str, x: str) -> None:
    line(axes, found, "value", "measured")
    line(axes, found, "limit", "the machine's limit", "k--")
    finish(axes, title, x, "ms a step")
    axes.set_ylim(bottom=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/performance.md.")
    parser.add_argument("--model", default="", help="as for bench/run.py")
    model = model_name(parser.parse_args().model)
    growth = load(model, "growth")
    figure, axes = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    throughput(axes[0][0], model)
    step_time(axes[0][1], points(growth, "batch "), "A step by batch (64 tokens of context)", "sequences")
    step_time(
        axes[1][0], points(growth, "batch 4, context "), "A step by context (4 sequences)", "tokens each"
    )
    step_time(
        axes[1][1], points(growth, "batch 32, blocks "), "A step by pool (32 sequences)", "blocks in the pool"
    )
    machine = growth["machine"]
    figure.suptitle(f"{model}, {machine['cpu']}, {machine['cpus']} cores, {machine['commit']}", fontsize=10)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "octavo"})
    figure.savefig(PICTURE, metadata={"Date": None})
    print(f"written to {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

"""docs/server.md against the code it describes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from octavo.server.protocol import LABELS, UNSUPPORTED, ChatBody, CompletionBody

DOC = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text()


def section(title: str) -> str:
    return DOC.split(f"\n## {title}\n")[1].split("\n## ")[0]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_the_table_of_fields_is_the_models() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (yes|) ?\| (yes|) ?\|", section("Fields of a request"), re.M)
    assert {name for name, has, _ in rows if has} == set(CompletionBody.model_fields)
    assert {name for name, _, has in rows if has} == set(ChatBody.model_fields)


def test_fields_that_are_accepted_or_refused_are_listed() -> None:
    paragraphs = section("Fields of a request").split("\n\n")
    labels = next(p for p in paragraphs if p.startswith("Accepted"))
    refused = next(p for p in paragraphs if p.startswith("Refused unless"))
    assert names_in(labels) == set(LABELS)
    assert names_in(refused.partition("): ")[2]) == set(UNSUPPORTED)


def test_routes_are_listed(make_app: Any) -> None:
    rows = set(re.findall(r"^\| `(GET|POST) (\S+)` \|", section("Routes"), re.M))
    paths = make_app().openapi()["paths"]
    assert rows == {(method.upper(), path) for path, methods in paths.items() for method in methods}

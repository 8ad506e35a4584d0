"""`octavo blocks`: the drawing, character by character, and what goes wrong on the way to it."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from octavo.cli import main
from octavo.cli.block_view import view
from octavo.core.kv_groups import group_layers
from octavo.core.kv_manager import KVCacheManager
from octavo.core.kv_spec import FullAttentionSpec
from octavo.engine.messages import BlockSnapshot, SequenceBlocks

SNAPSHOT = BlockSnapshot(
    block_size=4,
    ref_counts=[0, 1, 0, 1, 0, 0, 0, 2, 0, 12],
    cached=[2, 7],
    next_free=[4, 5, 6, 8, 0, 2],
    tables=[
        SequenceBlocks("cmpl-1", 0, 0, [7, 1], 8),
        SequenceBlocks("cmpl-1", 1, 0, [7, 3], 7),
        SequenceBlocks("cmpl-2", 0, 0, [None, 9], 6),
    ],
    num_swap_blocks=3,
    swap_tables=[SequenceBlocks("cmpl-3", 0, 0, [2, 0], 5)],
)


DOC_SNAPSHOT = BlockSnapshot(
    block_size=4,
    ref_counts=[0, 1, 0, 1, 0, 0, 2, 1] + [0] * 56,
    cached=[2, 6, 62, 63],
    next_free=[0, 4, 5, 8, 9],
    tables=[
        SequenceBlocks("cmpl-0f3", 0, 0, [6, 1], 7),
        SequenceBlocks("cmpl-0f3", 1, 0, [6, 3, 7], 9),
    ],
)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["blocks", *arguments])
    return int(str(ended.value.code))


def test_the_whole_drawing() -> None:
    assert list(view(SNAPSHOT)) == [
        "10 blocks of 4 tokens: 4 used (2 shared), 6 free (1 of them cached)",
        "3 blocks of swap space: 2 used",
        " 0  ·█c█···2·+",
        "· free   c free, content still found   █ in one table   2-9 in so many   + in ten or more",
        "next to be handed out: 4 5 6 8 0 2",
        "",
        "cmpl-1, choice 0: 8 tokens, 2 blocks",
        "  logical  physical  filled",
        "        0         7       4  │■■■■│  in 2 tables",
        "        1         1       4  │■■■■│",
        "",
        "cmpl-1, choice 1: 7 tokens, 2 blocks",
        "  logical  physical  filled",
        "        0         7       4  │■■■■│  in 2 tables",
        "        1         3       3  │■■■·│",
        "",
        "cmpl-2, choice 0: 6 tokens, 1 block",
        "  logical  physical  filled",
        "        1         9       2  │■■··│  in 12 tables",
        "",
        "cmpl-3, choice 0, in the swap space: 5 tokens, 2 blocks",
        "  logical  physical  filled",
        "        0         2       4  │■■■■│",
        "        1         0       1  │■···│",
    ]


def test_the_drawing_in_the_documentation() -> None:
    doc = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text()
    block = doc.split("## Debugging the block tables")[1].split("```\n")[1]
    assert block.splitlines() == list(view(DOC_SNAPSHOT))


def test_one_request_alone() -> None:
    lines = list(view(SNAPSHOT, "cmpl-2"))
    assert [line for line in lines if "choice" in line] == ["cmpl-2, choice 0: 6 tokens, 1 block"]


def test_equal_rows_of_a_large_pool_are_one_line() -> None:
    snapshot = BlockSnapshot(16, [1] * 70 + [0] * 930, [], [], [])
    assert list(view(snapshot))[1:5] == [
        "   0  " + "█" * 64,
        "  64  " + "█" * 6 + "·" * 58,
        " 128  " + "·" * 64 + "  × 13 rows",
        " 960  " + "·" * 40,
    ]


def test_a_bar_of_a_large_block_has_one_character_for_several_slots() -> None:
    snapshot = BlockSnapshot(128, [1], [], [], [SequenceBlocks("a", 0, 0, [0], 127)])
    assert list(view(snapshot))[-1] == "        0         0     127  │" + "■" * 31 + "·│"


def test_groups_of_layers_are_told_apart() -> None:
    tables = [SequenceBlocks("a", 0, g, [g], 2) for g in (0, 1)]
    lines = list(view(BlockSnapshot(4, [1, 1], [], [], tables)))
    assert [line for line in lines if line.startswith("a,")] == [
        "a, choice 0, group 0: 2 tokens, 1 block",
        "a, choice 0, group 1: 2 tokens, 1 block",
    ]


def test_the_worked_example_is_drawn_as_the_documentation_has_it() -> None:
    """docs/blocks.md: blocks 7, 1 and 3; the table after the prompt and after two more tokens."""
    manager = KVCacheManager(group_layers([FullAttentionSpec(1, 8)]), 8, 4)
    taken = [manager.pool.allocate() for _ in range(8)]
    for block_id in (7, 1, 3, 0, 2, 4, 5, 6):
        manager.pool.release(taken[block_id])
    manager.admit(0)  # type: ignore[arg-type]
    rows = []
    for num_tokens in (7, 8, 9):
        manager.grow(0, num_tokens)  # type: ignore[arg-type]
        [table] = manager.tables[0]  # type: ignore[index]
        counts = [manager.pool.ref_count(b) for b in range(8)]  # type: ignore[arg-type]
        shown = SequenceBlocks("a", 0, 0, list(table.block_ids), table.num_tokens)
        lines = list(view(BlockSnapshot(4, counts, [], [], [shown])))
        rows.append([line.split() for line in lines[6:]])
    assert rows == [
        [["0", "7", "4", "│■■■■│"], ["1", "1", "3", "│■■■·│"]],
        [["0", "7", "4", "│■■■■│"], ["1", "1", "4", "│■■■■│"]],
        [["0", "7", "4", "│■■■■│"], ["1", "1", "4", "│■■■■│"], ["2", "3", "1", "│■···│"]],
    ]


@pytest.fixture
def url() -> Iterator[str]:
    """A server that wants the key "k"."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_right = self.path == "/debug/blocks" and self.headers.get("Authorization") == "Bearer k"
            body = msgspec.json.encode(SNAPSHOT) if is_right else b'{"error": {"message": "No valid key."}}'
            self.send_response(200 if is_right else 401)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_a_server_is_asked_with_its_key(url: str, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--url", url + suffix, "--api-key", "k", "--request", "cmpl-2") == 0
    assert capsys.readouterr().out.splitlines() == list(view(SNAPSHOT, "cmpl-2"))


def test_a_snapshot_is_recorded_and_shown_again(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    assert run("--url", url, "--api-key", "k", "--record", str(file)) == 0
    shown = capsys.readouterr().out
    assert run("--file", str(file)) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--url", "{url}"], 1, "No valid key."),
        (["--url", "http://127.0.0.1:1"], 1, "cannot ask http://127.0.0.1:1/debug/blocks: "),
        (["--url", "localhost:8000"], 2, "--url localhost:8000: write it like"),
        (["--file", "{folder}/none.json"], 2, "none.json: No such file or directory"),
        (["--file", "{folder}/wrong.json"], 2, "holds no snapshot of blocks"),
        (
            ["--file", "{folder}/right.json", "--request", "x"],
            2,
            "--request x: it holds no blocks; these do: ",
        ),
        (["--file", "{folder}/right.json", "--record", "{folder}/no/x"], 2, "--record "),
    ],
)
def test_what_goes_wrong_is_said_on_one_line(
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    (tmp_path / "wrong.json").write_text('{"block_size": "x"}')
    (tmp_path / "right.json").write_bytes(msgspec.json.encode(SNAPSHOT))
    assert run(*(a.format(url=url, folder=tmp_path) for a in arguments)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1

"""Names, values and documentation of everything at /metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.messages import StepStats
from octavo.metrics.registry import Metrics

DOC = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

NAMES = {
    "octavo_build_info",
    "octavo_computed_tokens_total",
    "octavo_copied_blocks_total",
    "octavo_kv_blocks_saved",
    "octavo_prefix_tokens_hit_total",
    "octavo_requests_swapped",
    "octavo_swap_blocks",
    "octavo_swapped_blocks_total",
    "octavo_engine_up",
    "octavo_generated_tokens_total",
    "octavo_http_requests_total",
    "octavo_inter_token_seconds",
    "octavo_kv_block_slots",
    "octavo_kv_blocks",
    "octavo_kv_slots_filled",
    "octavo_kv_slots_unfilled",
    "octavo_kv_usage_ratio",
    "octavo_preemptions_total",
    "octavo_prompt_tokens_total",
    "octavo_queue_seconds",
    "octavo_recomputed_tokens_total",
    "octavo_request_seconds",
    "octavo_requests_finished_total",
    "octavo_requests_running",
    "octavo_requests_waiting",
    "octavo_schedule_seconds_total",
    "octavo_step_seconds",
    "octavo_steps_total",
    "octavo_time_to_first_token_seconds",
}


def exposed(metrics: Metrics) -> dict[str, str]:
    """Name as documented -> type."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        if family.name.endswith("_created"):
            continue  # when a series began: the client library adds these
        found[family.name + "_total" * (family.type == "counter")] = family.type
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_names_never_change() -> None:
    """Dashboards and routers depend on them: a change here is a change for every user."""
    assert set(exposed(Metrics("1"))) == NAMES


def test_the_documentation_lists_exactly_what_is_exposed() -> None:
    rows = re.findall(r"^\| `(\w+)(?:\{([\w,]+)\})?` \| (\w+) \| [^|]+ \| [^|]+ \|$", DOC.read_text(), re.M)
    assert {name: kind for name, _, kind in rows} == exposed(Metrics("1"))
    metrics = Metrics("1")
    metrics.count_http("GET", "/health", 200)
    labels = {
        name: set(sample.labels)
        for family in text_string_to_metric_families(metrics.exposition().decode())
        if family.type in ("gauge", "counter")
        for sample in family.samples
        for name in [sample.name]
        if not name.endswith("_created")
    }
    documented = {
        name: set(filter(None, given.split(","))) for name, given, kind in rows if kind != "histogram"
    }
    assert documented == labels


def test_every_expression_in_the_documentation_names_real_metrics() -> None:
    used = set(re.findall(r"octavo_\w+", DOC.read_text()))
    suffixed = {name + suffix for name in NAMES for suffix in ("", "_bucket", "_sum", "_count")}
    assert used <= suffixed


def test_every_stat_of_a_step_is_shown() -> None:
    metrics = Metrics("1.2", lambda: False)
    metrics.observe(
        StepStats(
            requests_running=2,
            requests_waiting=3,
            blocks_total=10,
            blocks_used=4,
            blocks_free=6,
            block_size=16,
            slots_filled=50,
            preemptions_total={"recompute": 1},
            recomputed_tokens_total=20,
            prompt_tokens_total=30,
            generated_tokens_total=40,
            computed_tokens_total=60,
            steps_total=1,
            step_s=[0.5],
            schedule_s=0.125,
        )
    )
    expected = {
        "octavo_engine_up": 0,
        "octavo_requests_running": 2,
        "octavo_requests_waiting": 3,
        "octavo_kv_usage_ratio": 0.4,
        "octavo_kv_block_slots": 16,
        "octavo_kv_slots_filled": 50,
        "octavo_kv_slots_unfilled": 14,
        "octavo_recomputed_tokens_total": 20,
        "octavo_prompt_tokens_total": 30,
        "octavo_generated_tokens_total": 40,
        "octavo_computed_tokens_total": 60,
        "octavo_steps_total": 1,
        "octavo_schedule_seconds_total": 0.125,
        "octavo_step_seconds_sum": 0.5,
        "octavo_step_seconds_count": 1,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    blocks = {state: value(metrics, "octavo_kv_blocks", state=state) for state in ("used", "free", "total")}
    assert blocks == {"used": 4, "free": 6, "total": 10}
    assert value(metrics, "octavo_preemptions_total", kind="recompute") == 1
    assert value(metrics, "octavo_build_info", version="1.2") == 1


def test_counters_follow_the_engine_and_finish_reasons_add_up() -> None:
    metrics = Metrics("1")
    for step in (1, 2, 3):
        metrics.observe(
            StepStats(
                steps_total=step, generated_tokens_total=10 * step, schedule_s=0.5, finished={"stop": 2}
            )
        )
    metrics.observe(StepStats(steps_total=3, generated_tokens_total=30, finished={"abort": 1}))
    assert value(metrics, "octavo_generated_tokens_total") == 30
    assert value(metrics, "octavo_schedule_seconds_total") == 1.5
    reasons = {
        r: value(metrics, "octavo_requests_finished_total", reason=r) for r in ("stop", "length", "abort")
    }
    assert reasons == {"stop": 6, "length": 0, "abort": 1}


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("ttft_s", "octavo_time_to_first_token_seconds"),
        ("inter_token_s", "octavo_inter_token_seconds"),
        ("request_s", "octavo_request_seconds"),
        ("queue_s", "octavo_queue_seconds"),
        ("step_s", "octavo_step_seconds"),
    ],
)
def test_intervals_land_in_their_histogram(field: str, name: str) -> None:
    metrics = Metrics("1")
    metrics.observe(StepStats(**{field: [0.25, 0.5]}))
    metrics.observe(StepStats(**{field: [1.0]}))
    assert value(metrics, f"{name}_sum") == 1.75
    assert value(metrics, f"{name}_count") == 3
    assert value(metrics, f"{name}_bucket", le="0.5") == 2


def test_idle_pool_is_shown_before_the_first_step() -> None:
    metrics = Metrics("1", initial=StepStats(blocks_total=7, blocks_free=7, block_size=16))
    assert value(metrics, "octavo_kv_blocks", state="free") == 7
    assert value(metrics, "octavo_kv_usage_ratio") == 0


def test_two_registries_share_nothing() -> None:
    first, second = Metrics("1"), Metrics("1")
    first.count_http("GET", "/health", 200)
    assert value(first, "octavo_http_requests_total", method="GET", route="/health", status="200") == 1
    assert value(second, "octavo_http_requests_total", method="GET", route="/health", status="200") is None

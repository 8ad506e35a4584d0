"""Metrics: what Octavo exposes to Prometheus. docs/metrics.md explains each name; the names are fixed.

Gauges and counters of the engine are read from its latest StepStats at scrape time; histograms observe the
times each StepStats brings. Each Metrics has a registry of its own: no globals, and no clock.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from octavo.core.delta import FinishReason
from octavo.engine.messages import StepStats

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_INTER_TOKEN_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_REQUEST_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_QUEUE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Feed it every StepStats and every HTTP answer; `exposition()` is the body of /metrics."""

    def __init__(
        self,
        version: str,
        is_engine_alive: Callable[[], bool] = lambda: True,
        initial: StepStats | None = None,
    ) -> None:
        """`initial` stands until the first step."""
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector(version, is_engine_alive, initial or StepStats())
        self.registry.register(self._engine)
        self._ttft = self._histogram("time_to_first_token", "From arrival to the first token.", _TTFT_S)
        self._inter_token = self._histogram(
            "inter_token", "Between two tokens of one choice.", _INTER_TOKEN_S
        )
        self._request = self._histogram(
            "request", "From arrival to the end, whatever the reason.", _REQUEST_S
        )
        self._queue = self._histogram(
            "queue", "Waiting to be scheduled, once per arrival and once per preemption.", _QUEUE_S
        )
        self._step = self._histogram("step", "One step of the engine.", _STEP_S)
        self._http = Counter(
            "octavo_http_requests",
            "HTTP requests answered; status 499 means that the client went away first.",
            ("method", "route", "status"),
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets_s: tuple[float, ...]) -> Histogram:
        return Histogram(f"octavo_{name}_seconds", text, buckets=buckets_s, registry=self.registry)

    def observe(self, stats: StepStats) -> None:
        """Take the stats. Cheap: it runs on the server's event loop."""
        self._engine.take(stats)
        for histogram, values in (
            (self._step, stats.step_s),
            (self._ttft, stats.ttft_s),
            (self._inter_token, stats.inter_token_s),
            (self._request, stats.request_s),
            (self._queue, stats.queue_s),
        ):
            for value in values:
                histogram.observe(value)

    def count_http(self, method: str, route: str, status: int) -> None:
        self._http.labels(method, route, str(status)).inc()

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


KINDS = {"recompute": 0, "swap": 0}  # of preemption, before the first


class _EngineCollector(Collector):
    """The latest StepStats, as gauges and counters."""

    def __init__(self, version: str, is_engine_alive: Callable[[], bool], initial: StepStats) -> None:
        self._version = version
        self._is_engine_alive = is_engine_alive
        self._stats = initial
        self._finished: Tally[str] = Tally(dict.fromkeys(get_args(FinishReason), 0))
        self._schedule_s = 0.0

    def take(self, stats: StepStats) -> None:
        self._stats = stats
        self._finished.update(stats.finished)
        self._schedule_s += stats.schedule_s

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("octavo_build", "Version of this server.", {"version": self._version})
        yield _gauge("engine_up", "1 while the engine process runs, else 0.", int(self._is_engine_alive()))
        yield from self._gauges()
        yield from self._counters()

    def _gauges(self) -> Iterator[Metric]:
        s = self._stats
        yield _gauge("requests_running", "Requests that hold blocks.", s.requests_running)
        yield _gauge("requests_waiting", "Requests that wait for blocks or for a place.", s.requests_waiting)
        yield _gauge(
            "requests_swapped", "Waiting requests whose blocks are in the swap space.", s.requests_swapped
        )
        blocks = GaugeMetricFamily("octavo_kv_blocks", "Blocks of the KV cache.", labels=("state",))
        for state, count in (
            ("used", s.blocks_used),
            ("free", s.blocks_free),
            ("cached", s.blocks_cached),
            ("shared", s.blocks_shared),
            ("total", s.blocks_total),
        ):
            blocks.add_metric((state,), count)
        yield blocks
        yield _gauge("kv_blocks_saved", "Blocks that sharing saves now.", s.blocks_saved)
        swap = GaugeMetricFamily("octavo_swap_blocks", "Blocks of the swap space.", labels=("state",))
        swap.add_metric(("used",), s.swap_blocks_used)
        swap.add_metric(("total",), s.swap_blocks_total)
        yield swap
        usage = s.blocks_used / s.blocks_total if s.blocks_total else 0.0
        yield _gauge("kv_usage_ratio", "Used blocks of all blocks, 0 to 1.", usage)
        yield _gauge("kv_block_slots", "Token slots in one block.", s.block_size)
        yield _gauge("kv_slots_filled", "Slots of used blocks that hold a token.", s.slots_filled)
        unfilled = s.blocks_used * s.block_size - s.slots_filled
        yield _gauge("kv_slots_unfilled", "Slots of used blocks without a token: fragmentation.", unfilled)

    def _counters(self) -> Iterator[Metric]:
        s = self._stats
        yield _labelled("preemptions", "Preemptions.", "kind", KINDS | s.preemptions_total)
        moved = {"out": s.blocks_swapped_out_total, "in": s.blocks_swapped_in_total}
        yield _labelled("swapped_blocks", "Blocks moved to and from the swap space.", "direction", moved)
        yield _counter(
            "copied_blocks", "Blocks copied because a shared one was written.", s.blocks_copied_total
        )
        yield _counter(
            "prefix_tokens_hit", "Prompt tokens found in the prefix cache.", s.prompt_tokens_cached_total
        )
        yield _counter(
            "recomputed_tokens", "Tokens computed again after preemption.", s.recomputed_tokens_total
        )
        yield _counter("prompt_tokens", "Prompt tokens of admitted requests.", s.prompt_tokens_total)
        yield _counter("generated_tokens", "Tokens drawn.", s.generated_tokens_total)
        yield _counter("computed_tokens", "Tokens run through the model.", s.computed_tokens_total)
        yield _counter("steps", "Steps of the engine.", s.steps_total)
        yield _counter("schedule_seconds", "Scheduling and bookkeeping, part of the steps.", self._schedule_s)
        yield _labelled("requests_finished", "Requests that ended.", "reason", self._finished)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"octavo_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"octavo_{name}", text, value)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"octavo_{name}", text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family

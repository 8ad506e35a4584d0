"""StepObserver against stamps worked out by hand."""

from octavo.core.delta import TokenDelta
from octavo.metrics.collect import Intervals, StepObserver


def test_one_request_gives_each_interval_once() -> None:
    observer = StepObserver()
    observer.on_arrival("a", 10.0)
    observer.on_scheduled("a", 10.5)
    observer.on_tokens([TokenDelta("a", 0, (7,))], 12.0)
    observer.on_tokens([TokenDelta("a", 0, (7,))], 12.25)
    observer.on_finished("a", "stop", 13.0)
    assert observer.drain() == Intervals(
        ttft_s=[2.0], inter_token_s=[0.25], request_s=[3.0], queue_s=[0.5], finished={"stop": 1}
    )


def test_drain_starts_empty_and_keeps_open_requests() -> None:
    observer = StepObserver()
    observer.on_arrival("a", 0.0)
    observer.on_scheduled("a", 1.0)
    assert observer.drain().queue_s == [1.0]
    assert observer.drain() == Intervals()
    observer.on_tokens([TokenDelta("a", 0, (7,))], 2.0)
    assert observer.drain() == Intervals(ttft_s=[2.0])


def test_scheduled_again_without_preemption_is_one_wait() -> None:
    observer = StepObserver()
    observer.on_arrival("a", 0.0)
    for now in (1.0, 2.0, 3.0):
        observer.on_scheduled("a", now)
    assert observer.drain().queue_s == [1.0]


def test_each_preemption_is_one_more_wait() -> None:
    observer = StepObserver()
    observer.on_arrival("a", 0.0)
    observer.on_scheduled("a", 1.0)
    observer.on_preempted("a", 4.0)
    observer.on_preempted("a", 5.0)
    observer.on_scheduled("a", 6.0)
    assert observer.drain().queue_s == [1.0, 2.0]


def test_tokens_delivered_together_share_the_gap() -> None:
    observer = StepObserver()
    observer.on_arrival("a", 0.0)
    observer.on_tokens([TokenDelta("a", 0, (7, 7))], 1.0)
    observer.on_tokens([TokenDelta("a", 0, (7, 7, 7, 7))], 3.0)
    intervals = observer.drain()
    assert intervals.ttft_s == [1.0]
    assert intervals.inter_token_s == [0.0, 0.5, 0.5, 0.5, 0.5]
    assert sum(intervals.inter_token_s) == 3.0 - 1.0


def test_choices_have_their_own_gaps_and_one_time_to_first_token() -> None:
    observer = StepObserver()
    observer.on_arrival("a", 0.0)
    observer.on_tokens([TokenDelta("a", 0, (7,))], 1.0)
    observer.on_tokens([TokenDelta("a", 1, (7,))], 1.5)
    observer.on_tokens([TokenDelta("a", 0, (7,))], 3.0)
    observer.on_tokens([TokenDelta("a", 1, (7,))], 2.5 + 1.0)
    intervals = observer.drain()
    assert intervals.ttft_s == [1.0]
    assert intervals.inter_token_s == [2.0, 2.0]


def test_no_tokens_is_no_event() -> None:
    observer = StepObserver()
    observer.on_arrival("a", 0.0)
    observer.on_tokens([TokenDelta("a", 0, ())], 1.0)
    assert observer.drain() == Intervals()


def test_finished_requests_are_forgotten() -> None:
    observer = StepObserver()
    observer.on_arrival("a", 0.0)
    assert observer.num_requests == 1
    observer.on_finished("a", "abort", 2.0)
    observer.on_tokens([TokenDelta("a", 0, (7,))], 3.0)
    observer.on_scheduled("a", 3.0)
    assert observer.num_requests == 0
    assert observer.drain() == Intervals(request_s=[2.0], finished={"abort": 1})


def test_request_refused_before_arrival_is_counted_without_a_time() -> None:
    observer = StepObserver()
    observer.on_finished("never", "error", 1.0)
    observer.on_finished("never2", "error", 1.0)
    assert observer.drain() == Intervals(finished={"error": 2})

"""Whom rejection hits and what it costs: classes of length and pass rate, counts, logged shares."""

import json
from types import SimpleNamespace

import pytest

from pace_lightning.training import admission_monitor
from pace_lightning.training.admission_monitor import (
    LENGTHS,
    PASS_RATES,
    AdmissionMonitor,
    SettledGroup,
    classify,
)


class Recorder:
    """A logger that remembers."""

    def __init__(self):
        self.lines = []

    def log_metrics(self, metrics, step):
        self.lines.append((step, metrics))


def step(monitor, drawn=(), rejected=(), *, version=0, ranking_seconds=0.0):
    """One draw of groups ``(length, pass rate)``; returns what was logged."""
    report = SimpleNamespace(
        version=version,
        ranking_seconds=ranking_seconds,
        response_tokens=tuple(length for length, _ in drawn),
        pass_rates=tuple(rate for _, rate in drawn),
        rejected_response_tokens=tuple(length for length, _ in rejected),
        rejected_pass_rates=tuple(rate for _, rate in rejected),
    )
    recorder = Recorder()
    monitor.on_step_end(SimpleNamespace(loggers=[recorder]), None, report)
    ((logged_at, metrics),) = recorder.lines
    assert logged_at == version
    return metrics


def groups(*lengths, rate=0.5):
    return [SettledGroup(length, rate, rejected=False) for length in lengths]


def test_ten_lengths_are_ten_deciles_in_whatever_order_they_come():
    lengths = [7.0, 1.5, 90.0, 3.0, 12.0, 2.0, 40.0, 5.0, 20.0, 4.0]
    ranks = [sorted(lengths).index(length) for length in lengths]
    assert [length for length, _ in classify(groups(*lengths))] == [LENGTHS[r] for r in ranks]


def test_equal_lengths_share_the_middle_of_their_ranks():
    # six below, four equal: mid-rank (6 + 2) / 10 = 0.8, the ninth decile
    assert [length for length, _ in classify(groups(1, 1, 1, 1, 1, 1, 9, 9, 9, 9))][6:] == [
        "length_decile_09"
    ] * 4
    assert {length for length, _ in classify(groups(*[5.0] * 7))} == {"length_decile_06"}


@pytest.mark.parametrize(
    ("rate", "name"),
    [
        (0.0, "pass_rate_000_025"),
        (0.2499, "pass_rate_000_025"),
        (0.25, "pass_rate_025_050"),
        (0.5, "pass_rate_050_075"),
        (0.75, "pass_rate_075_100"),
        (1.0, "pass_rate_075_100"),
        (-3.0, "pass_rate_000_025"),  # scores need not be pass rates
        (7.0, "pass_rate_075_100"),
    ],
)
def test_pass_rates_fall_into_quarters(rate, name):
    assert classify(groups(1.0, rate=rate))[0][1] == name


def test_both_sides_of_each_draw_are_counted_in_their_classes():
    monitor = AdmissionMonitor(lambda: 0.0)
    # lengths 1 to 10, the longest two rejected; the hard ones (0.1) among both sides
    step(
        monitor,
        drawn=[(length, 0.1 if length == 1 else 0.9) for length in range(1, 9)],
        rejected=[(9, 0.1), (10, 0.6)],
    )
    shares = monitor.shares()
    assert [*shares] == [*LENGTHS, "pass_rate_000_025", "pass_rate_050_075", "pass_rate_075_100"]
    assert shares["length_decile_08"] == {
        "settled_groups": 1,
        "rejected_groups": 0,
        "rejected_share": 0.0,
    }
    assert shares["length_decile_09"]["rejected_share"] == 1.0
    assert shares["pass_rate_000_025"] == {
        "settled_groups": 2,
        "rejected_groups": 1,
        "rejected_share": 0.5,
    }
    assert shares["pass_rate_050_075"]["rejected_groups"] == 1
    assert shares["pass_rate_075_100"]["settled_groups"] == 7


def test_a_group_is_counted_in_the_decile_it_had_when_it_was_settled():
    monitor = AdmissionMonitor(lambda: 0.0)
    step(monitor, drawn=[(length, 0.5) for length in range(10)])
    step(monitor, rejected=[(100, 0.5)])  # longer than all before: (10 + 0.5) / 11 = 0.95
    step(monitor, drawn=[(200, 0.5)] * 30)  # pushes it down to a lower decile, too late
    assert monitor.shares()["length_decile_10"]["rejected_groups"] == 1
    assert sum(monitor.shares()[name]["settled_groups"] for name in PASS_RATES[2:3]) == 41


def test_logged_shares_are_those_of_the_latest_groups(monkeypatch):
    monkeypatch.setattr(admission_monitor, "RECENT_GROUPS", 4)
    monitor = AdmissionMonitor(lambda: 0.0)
    logged = step(monitor, drawn=[(1, 0.9)], rejected=[(1, 0.9)])
    assert logged["rejected_share/pass_rate_075_100"] == 0.5
    assert logged["rejected_share/length_decile_06"] == 0.5
    logged = step(monitor, drawn=[(1, 0.9), (1, 0.9)], version=1)
    assert logged["rejected_share/pass_rate_075_100"] == 0.25
    logged = step(monitor, drawn=[(1, 0.9), (1, 0.9)], version=2)  # the first two have left
    assert logged["rejected_share/pass_rate_075_100"] == 0.0
    assert monitor.shares()["pass_rate_075_100"]["rejected_share"] == pytest.approx(1 / 6)


def test_without_any_rejection_no_share_is_plotted():
    logged = step(AdmissionMonitor(lambda: 0.0), drawn=[(1, 0.5), (2, 0.5)])
    assert logged.keys() == {"pool/ranking_seconds", "pool/rescore_seconds"}


def test_seconds_are_logged_per_step_and_summed():
    clock = iter([0.5, 0.75, 0.75])
    monitor = AdmissionMonitor(lambda: next(clock))
    first = step(monitor, drawn=[(1, 0.5)], ranking_seconds=0.25)
    second = step(monitor, drawn=[(1, 0.5)], ranking_seconds=0.5)
    assert (first["pool/rescore_seconds"], second["pool/rescore_seconds"]) == (0.5, 0.25)
    assert (first["pool/ranking_seconds"], second["pool/ranking_seconds"]) == (0.25, 0.5)
    assert (monitor.ranking_seconds, monitor.rescore_seconds) == (0.75, 0.75)


def test_a_restored_monitor_goes_on_as_if_nothing_had_happened():
    draws = [
        {"drawn": [(3, 0.5), (8, 0.1)], "rejected": [(20, 0.1)]},
        {"drawn": [(9, 0.4)], "rejected": [(25, 0.9), (2, 0.3)]},
    ]
    whole, first, second = (AdmissionMonitor(lambda: 0.0) for _ in range(3))
    for draw in draws:
        expected = step(whole, **draw)
    step(first, **draws[0])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert step(second, **draws[1]) == expected
    assert second.shares() == whole.shares()

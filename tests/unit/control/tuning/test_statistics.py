"""The race between candidates: which one leads, how certain that is, and which ones run again."""

from __future__ import annotations

import random

import pytest

from testbed.control.tuning.statistics import REQUIRED_CERTAINTY, Race


def test_the_leader_is_the_fastest_and_probabilities_add_up() -> None:
    race = Race({"a": [1.0, 1.01], "b": [1.2, 1.19], "c": [1.03]})
    probability = race.probability_best()
    assert race.leader() == "a"
    assert sum(probability.values()) == pytest.approx(1)
    assert probability["a"] > probability["c"] > probability["b"]


def test_one_run_each_is_enough_if_times_differ_much_and_not_if_they_are_close() -> None:
    assert Race({"a": [1.0], "b": [1.04]}).probability_best()["a"] < REQUIRED_CERTAINTY
    assert Race({"a": [1.0], "b": [1.5]}).probability_best()["a"] > REQUIRED_CERTAINTY


def test_two_runs_that_happen_to_agree_are_not_certainty() -> None:
    low, high = Race({"a": [1.0, 1.0]}).interval("a")
    assert high / low > 1.05


def test_equal_candidates_are_within_the_tolerance_only_after_enough_runs() -> None:
    few, many = (Race({"a": [0.97, 1.03] * pairs, "b": [0.98, 1.04] * pairs}) for pairs in (1, 20))
    assert few.probability_best()["a"] < REQUIRED_CERTAINTY < many.probability_best()["a"]


def test_the_fastest_are_repeated_whatever_the_probabilities_are() -> None:
    race = Race({name: [float(number)] for number, name in enumerate("abcdefgh", start=1)})
    assert race.probability_best()["a"] > REQUIRED_CERTAINTY and not race.repeated()
    assert race.due() == ["a", "b", "c", "d"]
    for name in "abcd":
        race.add(name, race.centre(name))
    assert race.due() == ["a", "b"] and race.repeated()
    race.add("a", 1.0)
    race.add("b", 2.0)
    assert race.due() == []


def test_large_differences_between_runs_lower_the_probability() -> None:
    """A lead of 20 % is not significant if runs differ by 30 %; two or three runs each show that."""
    steady = Race({"a": [1.0, 1.02, 0.99], "b": [1.2, 1.22, 1.19], "c": [1.4, 1.39]})
    wavering = Race({"a": [1.0, 1.3, 0.8], "b": [1.2, 0.9, 1.5], "c": [1.4, 1.0]})
    assert steady.probability_best()["a"] > REQUIRED_CERTAINTY > 0.9 > wavering.probability_best()["a"]


def test_the_95_percent_interval_contains_the_true_time_in_about_95_percent_of_cases() -> None:
    draw, held = random.Random(2), 0
    for _ in range(300):
        race = Race({name: [draw.lognormvariate(0, 0.03) for _ in range(3)] for name in "abc"})
        low, high = race.interval("a")
        held += low <= 1.0 <= high
    assert 0.90 <= held / 300 <= 0.99

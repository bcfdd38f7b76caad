"""Topic patterns, beside a matcher that tries everything."""

from __future__ import annotations

import itertools

import pytest

from django_amqp_events.declare.patterns import (
    pattern_matches,
    pattern_problem,
    patterns_overlap,
)

PATTERNS = [
    words for count in (1, 2, 3) for words in itertools.product(("a", "b", "*", "#"), repeat=count)
]
# Long enough: whatever two patterns of three words share, they share a name of six words.
NAMES = [words for count in range(1, 7) for words in itertools.product("abc", repeat=count)]


def matches(pattern: tuple[str, ...], name: tuple[str, ...]) -> bool:
    """Say whether a pattern matches, by trying every share of words for each ``#``."""
    if not pattern:
        return not name
    head, rest = pattern[0], pattern[1:]
    if head == "#":
        return any(matches(rest, name[count:]) for count in range(len(name) + 1))
    return bool(name) and head in ("*", name[0]) and matches(rest, name[1:])


def test_matches_as_trying_everything_does() -> None:
    for pattern in PATTERNS:
        for name in NAMES[:120]:
            assert pattern_matches(".".join(pattern), ".".join(name)) is matches(pattern, name), (
                pattern,
                name,
            )


def test_overlaps_where_some_name_is_matched_by_both() -> None:
    reached = {
        pattern: {index for index, name in enumerate(NAMES) if matches(pattern, name)}
        for pattern in PATTERNS
    }
    for first, second in itertools.combinations_with_replacement(PATTERNS, 2):
        expected = not reached[first].isdisjoint(reached[second])
        left, right = ".".join(first), ".".join(second)
        assert patterns_overlap(left, right) is expected, (left, right)
        assert patterns_overlap(right, left) is expected, (right, left)


def test_a_name_is_taken_literally() -> None:
    # RabbitMQ compares routing keys with patterns; a * in a routing key is a word like others.
    assert not pattern_matches("shop.created", "shop.*")
    assert not pattern_matches("shop.created", "#")
    assert pattern_matches("shop.*", "shop.*")


@pytest.mark.parametrize("words", [120, 128])
def test_many_hashes_end_in_time(words: int) -> None:
    hostile = ".".join(["#", "a"] * (words // 2))
    assert not pattern_matches(hostile, ".".join(["a"] * (words - 1) + ["b"]))
    assert patterns_overlap(hostile, hostile)


@pytest.mark.parametrize(
    "pattern",
    ["shop.order.created", "shop.*", "#", "*", "#.created", "a-b_c.ÄÖ", "x" * 255, "ä" * 127],
)
def test_good_patterns(pattern: str) -> None:
    assert pattern_problem(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (None, "not a string"),
        (5, "not a string"),
        ("", "empty"),
        ("x" * 256, "255 bytes"),
        ("ä" * 128, "255 bytes"),
        ("shop..created", "empty word"),
        (".shop", "empty word"),
        ("shop.", "empty word"),
        ("shop.order*", "whole words"),
        ("shop.##", "whole words"),
        ("shop.new order", "space"),
        ("shop\n", "space"),
        ("shop.\x00", "control"),
        ("shop.\ud800", "surrogate"),
        ("shop,order", "comma"),
        ("shop.[order]", "bracket"),
        ("shop.order?", "question mark"),
    ],
)
def test_bad_patterns(pattern: object, reason: str) -> None:
    problem = pattern_problem(pattern)
    assert problem is not None
    assert reason in problem

"""Patterns of dotted names: anchored, part by part, compared with a naive implementation."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from internsp.base.names import checked, matches, mistake, within

NAMES = st.lists(st.sampled_from(["a", "ab", "0", "3", "13", "30", "a3b"]), min_size=1, max_size=5)
SIGNS = ["*", "?", "a", "3", "{*}", "{2-13}"]
PARTS = st.lists(st.sampled_from(SIGNS), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("layers.*", ["layers.0", "layers.last"], ["layers", "layers.0.mlp", "x.layers.0"]),
        ("layers.1?", ["layers.10"], ["layers.1", "layers.100"]),
        ("layers.{*}", ["layers.0", "layers.12"], ["layers.x", "layers.1x", "layers."]),
        ("layers.{0-3}", ["layers.0", "layers.3"], ["layers.4", "layers.13", "layers.30"]),
        ("h{9-11}.wo", ["h9.wo", "h10.wo"], ["h1.wo", "h110.wo", "h99.wo", "h9.wo.weight"]),
        ("*{3-5}", ["x3", "x-4"], ["x14", "x33"]),
        ("**.experts", ["experts", "layers.0.mlp.experts"], ["experts.0", "shared_experts"]),
        ("layers.**.w2", ["layers.w2", "layers.0.mlp.w2"], ["w2", "layers.0.w2.weight"]),
        ("**", ["a", "a.b.c"], []),
        ("a+b.(c)", ["a+b.(c)"], ["aab.c"]),
    ],
)
def test_a_pattern_matches_whole_names_part_by_part(
    pattern: str, yes: list[str], no: list[str]
) -> None:
    assert mistake(pattern) is None
    assert [name for name in yes if not matches(name, pattern)] == []
    assert [name for name in no if matches(name, pattern)] == []


@pytest.mark.thorough(1)
@given(NAMES)
def test_every_name_matches_itself_and_nothing_longer(parts: list[str]) -> None:
    name = ".".join(parts)
    assert all(matches(name, p) for p in (name, "**", ".".join("*" for _ in parts)))
    assert not any(matches(longer, name) for longer in (f"{name}.x", f"x.{name}"))
    assert within(f"x.{name}.x", name)
    assert not matches(name, ".".join("*" for _ in [*parts, ""]))


def accepts(text: str, signs: list[str], at: int = 0) -> bool:
    """Whether a part's pattern matches ``text`` from ``at`` on, by trying every way."""
    if not signs:
        return at == len(text)
    sign, rest = signs[0], signs[1:]
    for end in range(at, len(text) + 1):
        taken = text[at:end]
        alone = not text[at - 1 : at].isdigit() and not text[end : end + 1].isdigit()
        number = taken.isdigit() and alone
        fits = {
            "*": True, "?": len(taken) == 1, "a": taken == "a", "3": taken == "3", "{*}": number,
            "{2-13}": number and taken in map(str, range(2, 14)),
        }  # fmt: skip
        if fits[sign] and accepts(text, rest, end):
            return True
    return False


def accepted(parts: list[str], pattern: list[list[str]]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == ["**"]:
        return any(accepted(parts[i:], pattern[1:]) for i in range(len(parts) + 1))
    return bool(parts) and accepts(parts[0], pattern[0]) and accepted(parts[1:], pattern[1:])


@given(NAMES, st.lists(PARTS | st.just(["**"]), min_size=1, max_size=4))
def test_patterns_mean_what_trying_every_way_means(
    parts: list[str], pattern: list[list[str]]
) -> None:
    text = ".".join("".join(signs) for signs in pattern)
    assume(all(signs == ["**"] or "**" not in "".join(signs) for signs in pattern))
    assert mistake(text) is None
    assert matches(".".join(parts), text) == accepted(parts, pattern)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("", "empty part"),
        ("layers..0", "empty part"),
        ("layers.", "empty part"),
        ("layers.**x", "between dots"),
        ("layers.[0-3]", "write {a-b}"),
        ("layers.{3-0}", "smaller number first"),
        ("layers.{0-99999}", "10000 at the most"),
        ("layers.{0,3}", "neither {*} nor {a-b}"),
        ("layers.{", "neither {*} nor {a-b}"),
        ("layers.}x", "neither {*} nor {a-b}"),
    ],
)
def test_a_pattern_without_a_sense_is_told_what_is_wrong(pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        checked(pattern)
    assert repr(pattern) in str(caught.value)


@given(st.text(alphabet="ab3.*?{}-[", max_size=12))
def test_what_has_no_mistake_can_be_matched(pattern: str) -> None:
    if mistake(pattern) is None:
        assert checked(pattern) == pattern
        assert matches("a.b3", pattern) in (True, False)


def test_many_stars_in_a_row_are_one() -> None:
    assert not matches("a." * 30 + "b", "**." * 20 + "x")  # 4.7e13 ways, one by one
    assert matches("a." * 30 + "b", "**." * 20 + "b")

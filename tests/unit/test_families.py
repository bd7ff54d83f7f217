"""The tool that compares families: its options, its settings, what it calls right."""

from __future__ import annotations

import pytest

from tools.families.configs import FAMILIES
from tools.families.options import CHECKPOINTING, MESHES, Options, Setting
from tools.families.report import Found, cell, remarks, rows

NONE = Setting(2, 1, "none", False)
FULL = Setting(2, 1, "full", False)


def found(setting: Setting = NONE, gradient: float = 1e-16, **options: object) -> Found:
    apart = {"loss": (1e-7, "step 0"), "gradient": (gradient, "head.weight, step 1")}
    return Found("llama", setting, apart, **options)  # type: ignore[arg-type]


def test_there_are_forty_families_and_without_options_all_are_compared() -> None:
    assert len(FAMILIES) >= 40
    options = Options.read([], None)
    assert options.families() == tuple(FAMILIES)
    settings = options.settings([False, True])
    assert {s.mesh for s in settings} == set(MESHES)
    assert {(s.weight, s.sequence) for s in settings} == {(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)}
    assert {s.checkpointing for s in settings} == set(CHECKPOINTING)
    assert {(s.mesh, s.tied) for s in settings} == {(m, t) for m in MESHES for t in (False, True)}
    assert all(s.ranks % s.weight == s.ranks % s.sequence == 0 for s in settings)


def test_a_family_that_is_always_tied_is_compared_in_every_form() -> None:
    settings = Options.read(["--mesh", "2x1"], None).settings([True])
    assert [s.checkpointing for s in settings] == list(CHECKPOINTING)
    assert all(s.tied for s in settings)


def test_options_choose_and_keep_the_tables_order() -> None:
    options = Options.read(["--family", "mamba2", "llama", "--mesh", "4x1"], None)
    assert options.families() == ("llama", "mamba2")
    assert {(s.weight, s.sequence, s.ranks) for s in options.settings([False])} == {(4, 1, 4)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--family", "lama"], "--family lama is not known: did you mean llama?"),
        (["--checkpointing", "ful"], "--checkpointing ful is not known: did you mean full?"),
        (["--mesh", "3x1"], "--mesh 3x1 is not known"),
        (["--mesh", "2"], "--mesh 2 is not known"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_meant(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        Options.read(arguments, None)


def test_a_difference_is_right_only_if_rounding_explains_it() -> None:
    assert found().right
    assert not found(gradient=1e-7).right, "not known to be fp32's"
    single = {"gradient": (1e-15, "")}
    assert found(gradient=1e-7, widened=single).right
    assert not found(gradient=1e-4, widened=single).right, "beyond fp32's"
    assert not found(gradient=1e-7, widened={"gradient": (1e-9, "")}).right
    assert not found(gradient=float("inf")).right
    refusal = Found("llama", NONE, {}, error="no", refused=True)
    assert refusal.right
    assert not Found("llama", NONE, {}, error="no").right


def test_a_column_is_the_worst_of_its_settings_and_says_what_was_refused() -> None:
    refusal = Found("llama", FULL, {}, error="because", refused=True)
    both = [found(), found(Setting(2, 1, "none", True), 3e-15), refusal]
    assert rows(both) == [
        ["family", "2x1", "none", "full", "untied", "tied", "in fp64"],
        ["llama", "3e-15*", "3e-15", "refused", "1e-16*", "3e-15", ""],
    ]
    assert remarks(both) == ["llama (2x1; full): because"]
    assert cell([found(gradient=0.1), refusal]) == "WRONG 1e-01"
    assert cell([Found("llama", NONE, {}, error="it hung")]) == "FAILED"
    (wrong,) = remarks([found(gradient=0.1)])
    assert wrong.startswith("llama (2x1; none): differs: ")
    assert "gradient head.weight, step 1 by 1.0e-01" in wrong

"""The tool that compares families: its options, its settings, its criterion."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.families.__main__ import main
from tests.families.configs import FAMILIES
from tests.families.options import CHECKPOINTING, MESHES, Kind, Options, Setting
from tests.families.report import Found, cell, remarks, restored, rows, summary

NONE = Setting(2, 1, "none", False)
FULL = Setting(2, 1, "full", False)
BOTH = Kind((False, True), own=True)


def found(setting: Setting = NONE, gradient: float = 1e-16, **options: object) -> Found:
    apart = {"loss": (1e-7, "step 0"), "gradient": (gradient, "head.weight, step 1")}
    return Found("llama", setting, apart, **options)  # type: ignore[arg-type]


def test_there_are_forty_families_and_without_options_all_are_compared() -> None:
    assert len(FAMILIES) >= 40
    options = Options.read([], None)
    assert options.families() == tuple(FAMILIES)
    for turn in range(3):
        settings = options.settings(BOTH, turn)
        assert {s.mesh for s in settings} == set(MESHES)
        degrees = {(s.weight, s.sequence) for s in settings}
        assert degrees == {(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)}
        assert {s.checkpointing for s in settings} == set(CHECKPOINTING)
        assert {s.tied for s in settings} == {False, True}
        assert all(s.ranks % s.weight == s.ranks % s.sequence == 0 for s in settings)


def test_thorough_is_all_with_all_and_the_families_together_have_every_pair() -> None:
    every = Options.read(["--thorough"], None).settings(BOTH)
    assert len(set(every)) == len(MESHES) * len(CHECKPOINTING) * 2
    options = Options.read([], None)
    drawn = [s for turn in range(len(FAMILIES)) for s in options.settings(BOTH, turn)]
    assert {(s.mesh, s.checkpointing) for s in drawn} == {
        (mesh, form) for mesh in MESHES for form in CHECKPOINTING
    }
    assert {(s.mesh, s.tied) for s in drawn} == {(m, t) for m in MESHES for t in (False, True)}


def test_a_family_is_asked_only_for_what_it_offers() -> None:
    kind = Kind((True,), own=False)
    for options in (["--mesh", "2x1"], ["--mesh", "2x1", "--thorough"]):
        settings = Options.read(options, None).settings(kind)
        assert [s.checkpointing for s in settings] == ["none", "full", "half", "reentrant"]
        assert all(s.tied for s in settings)
    assert Options.read(["--checkpointing", "own"], None).settings(kind) == []


def test_options_choose_and_keep_the_tables_order() -> None:
    options = Options.read(["--family", "mamba2", "llama", "--mesh", "4x1"], None)
    assert options.families() == ("llama", "mamba2")
    settings = options.settings(Kind((False,), True))
    assert {(s.weight, s.sequence, s.ranks) for s in settings} == {(4, 1, 4)}


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
    rough = replace(found(gradient=1e-4, widened=single), family="gemma4_text")
    assert rough.right
    assert not replace(rough, widened={"gradient": (1e-9, "")}).right
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


def test_parts_of_a_table_are_printed_together_and_the_later_of_two_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = {"gradient": (1e-15, "head.weight"), "loss": (0.0, "")}
    one, other = found(gradient=1e-7, widened=wide), found(FULL)
    again = [one, other, replace(one, widened=None, apart=wide)]
    assert restored(json.loads(json.dumps(summary(again)))) == [again[2], other]
    paths = [tmp_path / "one.json", tmp_path / "other.json"]
    for path, each in zip(paths, (one, other), strict=True):
        path.write_text(json.dumps(summary([each])))
    assert main(["--parts", *map(str, paths)]) == 0
    assert "1 families, 2 comparisons, 2 right" in capsys.readouterr().out
    assert main(["--parts", str(tmp_path / "none.json")]) == 2

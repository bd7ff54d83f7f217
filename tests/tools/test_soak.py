"""The soak test's own arithmetic, and one run of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools import soak
from tools.soak import Segment


def segments(leak: float, number: int = 6) -> list[Segment]:
    """Ranks that hold 100 MB, a varying amount, and a leak in each step."""
    rng = random.Random(3)
    found = []
    for index in range(number):
        held = [(0, 5 << 20), *((100 + n * 50, 0) for n in range(120))]
        memory = {
            pid: [(s, int(1e8 + 2e4 * rng.gauss(0, 1) + leak * s)) for s, _ in held]
            for pid in range(1 + index % 3)
        }
        found.append(Segment(2, {}, "none", memory=memory))
    return found


@pytest.mark.parametrize("leak", [0.0, 200.0, 4096.0])
def test_what_leaks_is_found_and_no_leak_is_within_its_error(leak: float) -> None:
    mean, error = soak.growth(soak.slopes(segments(leak)))
    assert abs(mean - leak) < error
    assert (abs(mean) > error) == (leak > 0)
    assert error < 40


def test_a_segment_that_hardly_ran_says_nothing_of_growth() -> None:
    short = Segment(1, {}, "none", memory={1: [(n, 10**8 + n) for n in range(100)]})
    assert soak.slopes([short]) == []


@pytest.mark.slow(12)
def test_a_soak_of_one_segment_is_right_and_what_is_wrong_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "MESHES", ((2, {"weight": 2}),))
    words = ["--minutes", "0", "--segment_seconds", "3", "--document", str(tmp_path / "page.md")]
    checked = soak.checked

    def wrong(folder: Path, segments: list[Segment]) -> dict[str, object]:
        found = checked(folder, segments)
        rows = folder / "run" / "metrics.jsonl"
        lines = rows.read_text().splitlines(keepends=True)
        assert found["steps lost or twice"] == found["tokens lost or twice"] == 0
        rows.write_text("".join([lines[0], *lines]))
        again = checked(folder, segments)
        assert again["steps lost or twice"] > 0
        assert again["tokens lost or twice"] > 0
        return found

    monkeypatch.setattr(soak, "checked", wrong)
    assert soak.main(words) == 0
    assert "| steps lost or twice | 0 |" in (tmp_path / "page.md").read_text()
    assert "SIGTERM" in capsys.readouterr().err

"""tools/count_gathers.py on its small case: FSDP2's 10, 20 and 36 all-gathers, and ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tools.bench.report import markdown_rows
from tools.count_gathers import HEAD, RANKS, TWELVE, TWO_A_CHUNK, WORLD, Counter

DOCUMENT = Path(__file__).parents[2] / "docs" / "dev" / "results" / "pipeline_gathers.md"


def rows(rank: int, world_size: int) -> list[tuple[str, ...]]:
    return Counter().count(TWO_A_CHUNK)


@pytest.mark.slow(6)
@pytest.mark.ranks
def test_the_small_case_is_as_the_document_says() -> None:
    cells, *others = run_ranks(rows, WORLD, timeout=120)
    assert all(other == cells for other in others)
    # Every block of a chunk once per micro-batch and once more, with any schedule.
    for case, row in zip(TWO_A_CHUNK, cells, strict=True):
        blocks = case.blocks // RANKS
        assert row[3].split()[0] == str(blocks * (case.micro_batches + 1))
        assert row[5].split()[0] == row[6].split()[0] == str(blocks)  # two blocks fit the two slots
        right, whole = row[7].split(" of ")
        assert right == whole
    assert [row[3].split()[0] for row in cells] == ["10", "20", "36"]
    lost = {row[0]: row[4].split(" of ") for row in cells}
    assert lost["1F1B"][0] == lost["1F1B"][1]
    assert lost["DualPipeV"][0] != lost["DualPipeV"][1]
    text = DOCUMENT.read_text()
    for line in markdown_rows(cells):
        assert line in text or line.startswith("|---")


def test_the_document_has_a_row_for_every_schedule() -> None:
    text = DOCUMENT.read_text()
    assert text.count("\n".join(markdown_rows([HEAD]))) == 2
    for case in (*TWELVE, *TWO_A_CHUNK):
        assert f"\n| {case.schedule} | {case.blocks} | {case.micro_batches} |" in text

"""docs/reference/errors.md has every public error class, its bases and its exit status."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from internsp import errors
from internsp.errors import InternspError

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
PUBLIC = [each for _, each in inspect.getmembers(errors, inspect.isclass)]
CLASSES = [each for each in PUBLIC if issubclass(each, InternspError)]


def rows() -> dict[str, list[str]]:
    """Cells of each row of the tables, by the class that the row is about."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    found = ((re.fullmatch(r"`(\w+Error)`", cells[0]), cells) for cells in lines)
    return {name[1]: cells for name, cells in found if name}


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_an_error_has_a_row_with_its_base_remedy_and_exit_status(error: type) -> None:
    if error is InternspError:
        assert "`internsp.errors.InternspError`" in PAGE.read_text()
        return
    _, base, cause, remedy, status = rows()[error.__name__]
    bases = [f"`{one.__name__}`" for one in error.__bases__ if one is not InternspError]
    assert [base] == bases
    assert int(status) == error.exit_status  # type: ignore[attr-defined]
    assert len(cause.split()) > 5
    assert len(remedy.split()) > 5


def test_no_row_is_about_a_class_that_is_gone() -> None:
    assert set(rows()) == {error.__name__ for error in CLASSES} - {"InternspError"}

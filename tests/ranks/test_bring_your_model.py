"""The example of docs/howto/sequences_in_my_model.md runs unchanged, and its model learns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tests.support import hf
from tests.support.ranks import run_ranks

DOCUMENT = Path(__file__).parents[2] / "docs" / "howto" / "sequences_in_my_model.md"


def ran(rank: int, world_size: int, source: str) -> dict[str, Any]:
    """Losses of the steps, and the generated text."""
    torch.use_deterministic_algorithms(False)
    source = re.sub(
        r"^( +)(?=.*\.backward\(\))", r"\1losses.append(float(out.loss)); ", source, flags=re.M
    )
    variables: dict[str, Any] = {"losses": []}
    exec(compile(source, DOCUMENT.name, "exec"), variables)
    return {"losses": variables["losses"], "text": variables["text"].tolist()}


def test_the_example_of_the_document_learns_and_generates() -> None:
    assert hf.VOCABULARY  # the fork server has transformers loaded
    (source,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    found = run_ranks(ran, 2, source)
    for result in found:
        assert len(result["losses"]) == 20
    totals = [sum(losses) for losses in zip(*(r["losses"] for r in found), strict=True)]
    assert totals[-1] < 0.5 * totals[0]
    assert found[0]["text"] == found[1]["text"]
    assert [len(row) for row in found[0]["text"]] == [8, 8]

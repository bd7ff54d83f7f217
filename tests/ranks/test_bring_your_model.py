"""The examples of docs/howto/sequences_in_my_model.md run unchanged, and their models learn."""

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
        r"^( +)(?=.*\.backward\(\))", r"\1losses.append(float(LOSS)); ", source, flags=re.MULTILINE
    ).replace("LOSS", "out.loss" if "out.loss" in source else "loss")
    variables: dict[str, Any] = {"losses": []}
    exec(compile(source, DOCUMENT.name, "exec"), variables)
    text = variables.get("text")
    return {"losses": variables["losses"], "text": None if text is None else text.tolist()}


def test_the_examples_of_the_document_learn_and_generate() -> None:
    assert hf.VOCABULARY  # the fork server has transformers loaded
    sources = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(sources) == 2
    for source in sources:
        found = run_ranks(ran, 2, source)
        for result in found:
            assert len(result["losses"]) == 20
        totals = [sum(losses) for losses in zip(*(r["losses"] for r in found), strict=True)]
        assert totals[-1] < 0.5 * totals[0]
        if "generate" in source:
            assert found[0]["text"] == found[1]["text"]
            assert [len(row) for row in found[0]["text"]] == [8, 8]

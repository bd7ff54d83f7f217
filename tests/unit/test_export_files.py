"""``internsp export``: how tensors are divided among files, and where a text ends."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from internsp.app.checkpoint import export
from internsp.app.config import Config


@pytest.mark.parametrize(
    ("most", "files"),
    [
        (7, ["a", "b", "c", "d"]),  # a tensor that is larger than a file is one by itself
        (15, ["a", "b", "c", "d"]),
        (16, ["ab", "cd"]),
        (23, ["ab", "cd"]),
        (24, ["abc", "d"]),
        (32, ["abcd"]),
    ],
)
def test_a_file_has_as_many_tensors_as_fit(
    most: int, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {}
    monkeypatch.setattr(
        export, "_write_file", lambda to, *given: written.update({to.name: given[-1]})
    )
    parts = [export._ExportTensor(name, (2,), "float32", name, torch.clone) for name in "abcd"]
    export._write_weights(tmp_path, tmp_path, None, parts, most)  # type: ignore[arg-type]
    assert ["".join(part.name for part in own) for own in written.values()] == files
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        listed = json.loads(index.read_text())
        assert listed["metadata"]["total_size"] == 32
        assert listed["weight_map"] == {p.name: n for n, own in written.items() for p in own}


@pytest.mark.parametrize(("named", "end"), [("</s>", 1), ("unusual", 3)])
def test_an_exported_model_stops_where_its_tokenizer_ended_documents(
    named: str, end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'data' is not installed")
    words = {"<unk>": 0, named: 1, "word": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.save(str(tmp_path / "words.json"))
    given = Config.model_validate({"data": {"tokenizer": str(tmp_path / "words.json")}})
    content = SimpleNamespace(step=1, data=SimpleNamespace(fingerprint="of a text"), tensors={})
    monkeypatch.setattr(export, "newest", lambda run: (run, content, given, []))
    monkeypatch.setattr(export, "_tensors", lambda *given: ())
    export.export(tmp_path, tmp_path / "to")
    found = json.loads((tmp_path / "to" / "config.json").read_text())
    assert found["eos_token_id"] == end
    assert (tmp_path / "to" / "tokenizer.json").exists()

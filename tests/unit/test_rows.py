"""Rows of JSONL, parquet and saved datasets: errors name the file and the row."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from internsp.app.config import DataConfig
from internsp.app.data.documents import paths_of, read_pieces, read_rows
from internsp.app.data.tokenizer import Piece
from internsp.errors import ConfigError


def texts(path: Path, source: str = "jsonl", field: str = "text") -> list[str]:
    config = DataConfig(source=source, paths=(str(path),), text_field=field)
    return [piece.text.decode() for piece in read_pieces(config, path)]


GOOD = b'{"text": "one"}\n\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (GOOD, ["one", "two"]),
        (b"\xef\xbb\xbf" + GOOD, ["one", "two"]),
        (GOOD.replace(b"\n", b"\r\n"), ["one", "two"]),
        (json.dumps([{"text": "one"}, {"text": "two"}], indent=1).encode(), ["one", "two"]),
        (b"", []),
    ],
)
def test_a_row_is_an_object_a_line_or_of_one_list(tmp_path, content, expected) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    assert texts(tmp_path / "a.jsonl") == expected
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    assert texts(tmp_path / "a.jsonl.gz") == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (GOOD + b'{"text": "thr', "row 4 is not JSON in UTF-8: Unterminated string"),
        (GOOD + b"{'text': 1}", "row 4 is not JSON"),
        (GOOD + b'{"text": "\xff"}', "row 4 is not JSON in UTF-8: .* position 10: invalid"),
        (GOOD.decode().encode("utf-16"), "row 1 is not JSON in UTF-8"),
        (GOOD + b'{"text": "\\ud800"}', r"row 4: 'utf-8' codec can't encode character '\\ud800'"),
        (GOOD + b'{"text": null}', "row 4 has no text 'text'; nothing there"),
        (GOOD + b'{"text": 3}', "row 4 has no text 'text'; int there"),
        (GOOD + b'{"body": "a"}', r"row 4 has no 'text'; it has \['body'\]"),
        (GOOD + b"[1]", "row 4: not an object with named values, but list"),
        (GOOD + b"9" * 5000, "row 4 is not JSON in UTF-8: Exceeds the limit"),
        (GOOD + b"[" * 100_000, "row 4 is not JSON in UTF-8: maximum recursion depth"),
        (b'[{"text": "a"}, 5]', "row 2: not an object with named values, but int"),
        (b'[{"text": "a"}, ', "a.jsonl is not JSON"),
    ],
)  # fmt: skip
def test_a_mistake_in_jsonl_names_the_file_and_the_row(tmp_path, content, expected) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=f"a.jsonl.*{expected}|{expected}") as caught:
        texts(tmp_path / "a.jsonl")
    assert str(tmp_path / "a.jsonl") in str(caught.value)
    assert caught.value.exit_status == 2


PACKED = gzip.compress(GOOD * 500)


@pytest.mark.parametrize(
    "content",
    [PACKED[: len(PACKED) // 2], b"not packed", PACKED[:-6] + b"123456"],
    ids=["half of it", "not packed", "another checksum"],
)
def test_a_packed_file_that_is_cut_is_told(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a.jsonl.gz cannot be read to its end: \w"):
        texts(tmp_path / "a.jsonl.gz")


def test_a_mistake_in_parquet_names_the_file_and_the_row(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'data' is not installed")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"

    def write(values) -> bytes:
        parquet.write_table(
            pyarrow.table({"text": values}), path, write_page_checksum=True, compression="none",
            use_dictionary=False, write_statistics=False,
        )  # fmt: skip
        return path.read_bytes()

    def told() -> str:
        with pytest.raises(ConfigError) as caught:
            texts(path, "parquet", "text")
        assert str(path) in str(caught.value)
        return str(caught.value).replace(str(path), "a.parquet")

    whole = write(["a text of some length"] * 5000)
    assert texts(path, "parquet", "text") == ["a text of some length"] * 5000
    cut = "data.paths: a.parquet, after row 0: cannot be read, or not to its end"
    assert told_for(path, whole[:-50], told).startswith(cut)
    assert told_for(path, whole[50:], told).startswith(cut)
    flipped = bytearray(whole)
    flipped[whole.index(b"of some")] ^= 1
    assert "or not to its end" in told_for(path, bytes(flipped), told), "by its checksum"
    assert told_for(path, b"", told).startswith(cut)
    write(["one", None])
    assert told() == "data.text_field: a.parquet, row 2 has no text 'text'; nothing there"
    write([1, 2])
    assert told() == "data.text_field: a.parquet, row 1 has no text 'text'; int there"
    data = write(["one", "two", "three"]).replace(b"two", b"t\xff\xff")
    path.write_bytes(data)
    assert "not to its end" in told()
    with pytest.raises(ConfigError, match=r"a.parquet has no column 'body'; it has \['text'\]"):
        texts(path, "parquet", "body")


def told_for(path: Path, content: bytes, told) -> str:
    path.write_bytes(content)
    return told()


def test_rows_of_a_saved_dataset_are_documents_and_a_mistake_in_it_names_the_row(tmp_path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'data' is not installed")
    rows = ["one", "two é", "three"] * 300
    saved = datasets.Dataset.from_dict({"body": rows, "n": list(range(900))})
    saved.save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved", "datasets", "body") == rows
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "splits")
    assert texts(tmp_path / "splits" / "train", "datasets", "body") == rows
    chats = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]] * 3
    datasets.Dataset.from_dict({"messages": chats}).save_to_disk(tmp_path / "chats")
    config = DataConfig(source="datasets", paths=(str(tmp_path),), format="chat")
    assert [value for _, value in read_rows(config, tmp_path / "chats")] == chats
    datasets.Dataset.from_dict({"body": ["a", None]}).save_to_disk(tmp_path / "none")
    (tmp_path / "other").mkdir()
    for name, told in {
        "none": "row 2 has no text 'body'; nothing there",
        "chats": r"data.text_field: .*chats has no column 'body'; it has \['messages'\]",
        "splits": r"has splits \['test', 'train'\]: name one, as .*/splits/train",
        "other": "other, after row 0: cannot be read, or not to its end: .*other",
    }.items():
        with pytest.raises(ConfigError, match=told):
            texts(tmp_path / name, "datasets", "body")


def test_files_that_cannot_be_read_are_named_and_pipes_are_not_waited_for(tmp_path) -> None:
    def told(name: str, source: str = "text") -> str:
        config = DataConfig(source=source, paths=(str(tmp_path / name),))
        with pytest.raises(ConfigError) as caught:
            list(read_pieces(config, paths_of(config)[0]))
        return str(caught.value)

    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mem.jsonl").symlink_to("/proc/self/mem")
    assert "mem.jsonl cannot be read: Input/output error" in told("folder")
    assert "mem.jsonl cannot be read to its end: Input/output error" in told("folder", "jsonl")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "gone.jsonl").symlink_to("nowhere")
    assert "gone.jsonl cannot be read: No such file" in told("links")
    assert "gone.jsonl cannot be read to its end: No such file" in told("links", "jsonl")
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "a.jsonl")
    assert "no .jsonl or .json" in told("pipes", "jsonl")
    (tmp_path / "pipes" / "b.txt").write_text("text beside a pipe")
    config = DataConfig(source="text", paths=(str(tmp_path / "pipes"),))
    beside = Piece(b"text beside a pipe", True, str(tmp_path / "pipes" / "b.txt"))
    assert list(read_pieces(config, tmp_path / "pipes")) == [beside]

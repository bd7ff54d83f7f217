"""Indices: the same sequences as from memory, built once, reused while valid, whole or absent."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from internsp.app.config import DataConfig
from internsp.app.data import index, store
from internsp.app.data.batches import DataSource
from internsp.app.data.store import TokenFile
from internsp.errors import ConfigError, InternspError, MachineError

TEXTS = [f"document {i}: " + "some words of it, " * (i % 7) for i in range(60)]


def write(folder: Path, kind: str, texts: list[str] = TEXTS) -> Path:
    """The texts as a file or folder of ``kind``."""
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if kind == "text":
        (folder / "texts").mkdir()
        for number, text in enumerate(texts):
            (folder / "texts" / f"{number:03}.txt").write_text(text)
        return folder / "texts"
    path = folder / {"jsonl": "a.jsonl", "gz": "a.jsonl.gz", "parquet": "a.parquet"}[kind]
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="the extra 'data' is not installed")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        path.write_bytes(gzip.compress(lines) if kind == "gz" else lines)
    return path


def source(path: Path, kind: str = "jsonl", **changes: object) -> DataSource:
    settings = {
        "source": "jsonl" if kind == "gz" else kind, "paths": (str(path),), "sequence_length": 16,
        "held_out": 0.1, "index": "always", **changes,
    }  # fmt: skip
    return DataSource.create(DataConfig(**settings), global_batch=8, seed=3)


def indices(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.index*"))


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", ["text", "jsonl", "gz", "parquet"])
def test_an_index_gives_the_sequences_that_memory_gives(
    kind: str, pack: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "data", kind)
    one, other = source(path, kind, pack=pack), source(path, kind, pack=pack, index="never")
    assert isinstance(one.parts[0].stores[0], TokenFile)
    assert len(indices(tmp_path / "data")) == 1
    assert one.fingerprint == other.fingerprint
    for taken in (0, 8, 800):
        batches = [given.train_batch(taken) for given in (one, other)]
        assert torch.equal(batches[0].ids, batches[1].ids)
        assert batches[0][1:] == batches[1][1:]
    held = [next(given.held_out_batches(1)).ids for given in (one, other)]
    assert torch.equal(*held)
    assert [one.position_of(n) for n in range(30)] == [other.position_of(n) for n in range(30)]
    (note,) = one.notes
    found = one.parts[0].stores[0]
    assert f"{found.tokens:,} tokens in 60 documents, made in" in note
    assert indices(tmp_path / "data")[0].stat().st_size == found.nbytes
    assert not other.notes


def test_an_index_is_reused_until_its_data_or_what_made_it_change(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")

    def said(**changes: object) -> str:
        return source(path, **changes).notes[0].rpartition(", ")[2]

    assert "there was none" in said()
    before = indices(tmp_path)[0].stat()
    assert said() == "reused"
    assert indices(tmp_path)[0].stat().st_ino == before.st_ino
    when = path.stat().st_mtime_ns
    os.utime(path, ns=(when, when + 1))
    assert "the data have changed" in said()
    # The same size and time, other bytes.
    path.write_bytes(path.read_bytes().replace(b"words", b"WORDS"))
    os.utime(path, ns=(when, when + 1))
    assert "the data have changed" in said()
    assert bytes(source(path).parts[0].stores[0].read(13, 30).astype(np.uint8)).count(b"WORDS")
    with path.open("ab") as file:
        file.write(b'{"text": "one more"}\n')
    assert "the data have changed" in said()
    # Another column or tokenizer has a separate index; reading a folder finds none of them.
    path.write_text("".join(json.dumps({"text": t, "body": t[:9]}) + "\n" for t in TEXTS))
    said()
    assert "there was none" in said(text_field="body")
    assert len(indices(tmp_path)) == 2
    assert "60 documents" in source(tmp_path).notes[0]


@pytest.mark.parametrize("damage", ["cut", "flipped", "header", "other", "empty"])
def test_a_damaged_index_is_made_anew(damage: str, tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")
    wanted = source(path).train_batch(0).ids
    (target,) = indices(tmp_path)
    content = bytearray(target.read_bytes())
    if damage == "flipped":
        content[len(content) // 3] ^= 1
    if damage == "header":
        content[-40] ^= 1
    cases = {"cut": content[:-5], "other": b"something else than an index", "empty": b""}
    target.write_bytes(cases.get(damage, content))
    again = source(path)
    assert "the old one could not be read" in again.notes[0]
    assert torch.equal(again.train_batch(0).ids, wanted)
    assert source(path).notes[0].endswith("reused")


def no_room(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store.os, "fsync" if number == errno.ENOSPC else "replace", refuse)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EROFS, ConfigError), (errno.EACCES, ConfigError),
                         (errno.ENOSPC, MachineError)],
)  # fmt: skip
def test_an_index_that_cannot_be_written_says_where_else_and_leaves_nothing(
    number: int, kind: type[InternspError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "data", "jsonl")
    with monkeypatch.context() as patched:
        no_room(number, patched)
        with pytest.raises(kind, match=rf"{os.strerror(number)}; give another folder by data\.ind"):
            source(path)
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["a.jsonl"]
    elsewhere = source(path, index_dir=str(tmp_path / "place"))
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["a.jsonl"]
    assert len(list((tmp_path / "place").iterdir())) == 1
    assert torch.equal(elsewhere.train_batch(0).ids, source(path).train_batch(0).ids)


def test_a_folder_that_is_a_file_is_no_place(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: File exists; give another folder"):
        source(path, index_dir=str(tmp_path / "file"))


def test_a_writer_that_dies_leaves_the_old_index_and_its_part_is_removed_later(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, "jsonl")
    source(path)
    (target,) = indices(tmp_path)
    old = target.read_bytes()
    code = (
        "import os, sys; from internsp.app.data import store; "
        "store.os.replace = lambda *a: os._exit(9); "
        "from tests.unit.test_index import source; from pathlib import Path; "
        "p = Path(sys.argv[1]); os.utime(p); source(p)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    assert target.read_bytes() == old
    (left,) = tmp_path.glob(".*.partial")
    assert "made in" in source(path).notes[0]
    assert left.exists(), "it may be another writer's that has just begun"
    os.utime(left, (time.time() - 100,) * 2)
    os.utime(path, (1, 1))
    source(path)
    assert indices(tmp_path) == [target]


def test_data_that_change_meanwhile_are_refused_and_an_index_opened_before_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "jsonl")
    first = source(path)
    wanted = first.train_batch(0).ids
    own = index.encoded

    def changing(*given: object) -> Iterator[object]:
        yield from own(*given)  # type: ignore[arg-type]
        with path.open("ab") as file:
            file.write(b'{"text": "later"}\n')

    os.utime(path, (1, 1))
    with monkeypatch.context() as patched:
        patched.setattr(index, "encoded", changing)
        with pytest.raises(ConfigError, match="was changed while its index was made"):
            source(path)
    assert indices(tmp_path) == []
    assert torch.equal(first.train_batch(0).ids, wanted)


def test_several_that_make_one_index_at_once_all_read_it(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")
    found: list[object] = []

    def make() -> None:
        try:
            found.append(source(path).train_batch(0).ids.tolist())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [source(path, index="never").train_batch(0).ids.tolist()] * 6
    assert len(list(tmp_path.iterdir())) == 2


def test_by_itself_only_what_is_large_is_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "jsonl")
    monkeypatch.setattr(index, "AUTO_BYTES", path.stat().st_size + 1)
    assert not source(path, index="auto").notes
    monkeypatch.setattr(index, "AUTO_BYTES", path.stat().st_size)
    assert source(path, index="auto").notes


_CHILD = """
import resource, sys
from pathlib import Path
import numpy as np
import torch
from tests.unit.test_index import source

kind, path, room = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
used = {k: int(v) for k, v in (l.split()[:2] for l in open("/proc/self/status") if "kB" in l)}
limit = used["VmData:"] * 1024 + room
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    bytearray(room + (8 << 20))
    sys.exit("the limit does not hold")
except MemoryError:
    pass
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = source(path, kind, sequence_length=1 << 16, index=sys.argv[4])
rows = made.parts[0].train.per_epoch
total = sum(int(made.train_batch(taken).ids.sum()) for taken in range(0, rows, 8))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(rows, total, grown * 1024)
"""


@pytest.mark.slow(6)
@pytest.mark.parametrize("kind", [pytest.param("text", marks=pytest.mark.thorough(12)), "jsonl"])
def test_a_file_several_times_larger_than_the_memory_that_is_left_is_indexed_and_read(
    kind: str, tmp_path: Path
) -> None:
    """Under a limit (``RLIMIT_DATA``) too small to hold the tokens, a complete pass is read."""
    room, size = 72 << 20, 144 << 20
    path = tmp_path / "large.jsonl"
    line = "the same words again and again " * 64
    with path.open("w") as file:
        while file.tell() < size:
            row = f"{file.tell()} {line}\n"
            file.write(json.dumps({"text": row}) + "\n" if kind == "jsonl" else row)

    def child(how: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", _CHILD, kind, str(path), str(room), how]
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)

    done = child("always")
    assert done.returncode == 0, done.stderr
    rows, total, grown = map(int, done.stdout.split())
    assert rows << 16 > 0.85 * size
    assert total > 80 * (rows << 16), "the tokens themselves were read"
    assert grown < room < size <= path.stat().st_size
    if kind == "text":
        refused = child("never")
        assert refused.returncode
        assert "MemoryError" in refused.stderr


def test_an_index_of_a_long_name_has_a_place_and_what_is_no_file_has_none(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl").rename(tmp_path / ("x" * 240 + ".jsonl"))
    wanted = source(path, index="never").train_batch(0).ids
    assert torch.equal(source(path).train_batch(0).ids, wanted)
    assert torch.equal(source(path, index_dir=str(tmp_path / "i")).train_batch(0).ids, wanted)
    with pytest.raises(ConfigError, match="/dev/zero is no regular file and has more than"):
        source(Path("/dev/zero"), "text", index="never")


def test_documents_of_one_token_leave_nothing_to_pad() -> None:
    with pytest.raises(ConfigError, match="no document has two tokens"):
        rows_of_nothing()


def rows_of_nothing() -> None:
    from internsp.app.data import batches
    from internsp.app.data.tokenizer import ByteTokenizer

    given = DataConfig(sequence_length=4, held_out=0.0, pack=False)
    ones = store.TokenArray([(np.ones(1, np.uint16), store.End(1, b"x" * 16))] * 3, np.uint16)
    batches.Part.create(given, [ones], given, ByteTokenizer(), 0)

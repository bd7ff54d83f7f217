"""Tokens on disk: the sequences that memory gives, made once, reused while valid."""

from __future__ import annotations

import errno
import gzip
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from internsp.app.config import HELD_OUT, DataConfig
from internsp.app.data import tokens
from internsp.app.data.batches import DataSource, Part
from internsp.app.data.tokenizer import ByteTokenizer, smallest_dtype
from internsp.app.data.tokens import TokenStore
from internsp.errors import ConfigError, InternspError, MachineError
from tests.support.batches import train_batch

TEXTS = [f"document {i}: " + "some words of it, " * (i % 7) for i in range(60)]
END = 256


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


def source_of(path: Path, kind: str = "jsonl", **changes: object) -> DataSource:
    settings = {
        "source": "jsonl" if kind == "gz" else kind, "paths": (str(path),), "sequence_length": 16,
        "held_out": 0.1, **changes,
    }  # fmt: skip
    return DataSource(DataConfig(**settings), global_batch=8, seed=3)


def source(path: Path, kind: str = "jsonl", least: int = 0, **changes: object) -> DataSource:
    """The source of a path whose tokens are on disk if its files have ``least`` bytes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tokens, "CACHED_BYTES", least)
        return source_of(path, kind, **changes)


IN_MEMORY = 1 << 40


def stores(given: DataSource) -> tuple[TokenStore, ...]:
    return given.parts[0].train.documents.stores


def folders(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.tokens*"))


def require_same(one: DataSource, other: DataSource) -> None:
    assert one.fingerprint == other.fingerprint
    for taken in (0, 8, 800):
        batches = [train_batch(given, taken) for given in (one, other)]
        assert torch.equal(batches[0].ids, batches[1].ids)
        assert batches[0][1:] == batches[1][1:]
    held = [next(given.evaluation(HELD_OUT, 1)).ids for given in (one, other)]
    assert torch.equal(*held)
    assert [one.position_of(n) for n in range(30)] == [other.position_of(n) for n in range(30)]


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", ["text", "jsonl", "gz", "parquet"])
def test_tokens_on_disk_give_the_sequences_that_memory_gives(
    kind: str, pack: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "data", kind)
    one, other = source(path, kind, pack=pack), source(path, kind, IN_MEMORY, pack=pack)
    assert len(folders(tmp_path / "data")) == 1
    require_same(one, other)
    (note,) = one.notes
    assert f"{len(stores(one)[0].ids):,} tokens in 60 documents, made in" in note
    assert not other.notes
    # A text whose tokens are on disk goes on as the same tokens, given themselves.
    (pair,) = (tmp_path / "data").glob(".*/tokens.bin")
    for least in (0, IN_MEMORY):
        require_same(source(pair, "tokens", least, pack=pack), other)


def test_files_of_tokens_are_as_megatron_writes_them(tmp_path: Path) -> None:
    source(write(tmp_path, "jsonl"))
    (folder,) = folders(tmp_path)
    index = (folder / "tokens.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    assert struct.unpack("<QBQQ", index[9:34]) == (1, 8, 60, 61), "version, uint16, sequences"
    sizes, begins, documents = index[34:274], index[274:754], index[754:]
    wanted = [len(text.encode()) + 1 for text in TEXTS]
    assert np.frombuffer(sizes, "<i4").tolist() == wanted
    assert np.frombuffer(begins, "<i8").tolist() == [2 * sum(wanted[:n]) for n in range(60)]
    assert np.frombuffer(documents, "<i8").tolist() == list(range(61))
    found = np.fromfile(folder / "tokens.bin", "<u2")
    assert found[: wanted[0]].tolist() == [*TEXTS[0].encode(), END]
    assert len(found) == sum(wanted)
    assert smallest_dtype(1 << 17) == np.int32, "Megatron has no unsigned one of four bytes"


def pair(path: Path, *documents: list[list[int]], dtype: str = "<i4", code: int = 4) -> Path:
    """A user's own pair: documents of one sequence or several."""
    ends = np.cumsum([0, *(len(document) for document in documents)])
    sequences = [sequence for document in documents for sequence in document]
    sizes = np.array([len(sequence) for sequence in sequences], "<i4")
    begins = ((np.cumsum(sizes) - sizes) * np.dtype(dtype).itemsize).astype("<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sizes), len(ends))
    rest = sizes.tobytes() + begins.tobytes() + ends.astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + rest)
    np.array([token for sequence in sequences for token in sequence], dtype).tofile(path)
    return path


@pytest.mark.parametrize("least", [0, IN_MEMORY], ids=["mapped", "in memory"])
def test_a_users_own_pair_is_read_where_it_lies(least: int, tmp_path: Path) -> None:
    """Documents of several sequences, without an end, and empty ones, which are left out."""
    given = pair(
        tmp_path / "a.bin", [[1, 2], [3, END]], [[4, 5, 6]], [[]], [], [[7] * 40, [END]], [[8, END]]
    )
    made = source(given, "tokens", least, held_out=0.0, pack=False, sequence_length=8)
    (store,) = stores(made)
    assert store.lengths().tolist() == [4, 3, 41, 2]
    assert store.ids.tolist() == [1, 2, 3, END, 4, 5, 6, *[7] * 40, END, 8, END]
    padded = [1, 2, 3, *[END] * 5]
    assert padded in [
        made.row(number).ids.tolist() for number in range(made.parts[0].train.per_epoch)
    ]
    assert [file.name for folder in folders(tmp_path) for file in folder.iterdir()] == (
        ["digests"] if least == 0 else []
    ), "no second copy of the tokens"
    # A folder of pairs; the same tokens as another dtype are the same data.
    (tmp_path / "more").mkdir()
    pair(tmp_path / "more" / "a.bin", [[1, 2, 3, END]], dtype="<u2", code=8)
    pair(tmp_path / "more" / "b.bin", [[4, 5, 6]])
    both = source(tmp_path / "more", "tokens", least, held_out=0.0, sequence_length=2)
    assert [store.ids.tolist() for store in stores(both)] == [[1, 2, 3, END], [4, 5, 6]]
    alone = pair(tmp_path / "c.bin", [[1, 2, 3, END]])
    (found,) = stores(source(alone, "tokens", least, held_out=0.0, sequence_length=2))
    assert found.digest() == stores(both)[0].digest()


@pytest.mark.parametrize("least", [0, IN_MEMORY], ids=["mapped", "in memory"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            "cut",
            r"a\.bin was cut, or is another file: it has 158 bytes, and its \.idx lists 40 tok",
        ),
        ("longer", r"a\.bin was cut, or is another file: it has 164 bytes"),
        ("cut index", r"a\.idx was cut, or is of another kind: it has 89 bytes"),
        ("empty index", r"a\.idx is no index of tokens as Megatron writes it"),
        ("another kind", r"a\.idx is no index of tokens as Megatron writes it"),
        ("of floats", r"a\.idx is no index of tokens as Megatron writes it"),
        ("documents", r"a\.idx lists documents that are not its sequences"),
        ("backwards", r"a\.idx lists documents that are not its sequences"),
        ("below none", r"a\.idx lists documents that are not its sequences"),
        ("no index", r"data\.paths: .*a\.idx cannot be read: No such file or directory"),
        (
            "large",
            r"a\.bin has tokens from 1 to 300, but data\.tokenizer has the ids below 257: gi",
        ),
        ("negative", r"a\.bin has tokens from -1 to 3, but data\.tokenizer has the ids below 257"),
    ],
)
def test_a_pair_that_is_not_whole_is_refused_when_it_is_opened(
    damage: str, message: str, least: int, tmp_path: Path
) -> None:
    path = pair(tmp_path / "a.bin", [[1, 2, 3, 3] * 9], [[1, 2], [3, 3]])
    index = path.with_suffix(".idx")
    content, listed = path.read_bytes(), index.read_bytes()
    changed = {
        "cut": (content[:-2], listed), "longer": (content + bytes(4), listed),
        "cut index": (content, listed[:-5]), "empty index": (content, b""),
        "another kind": (content, b"TNTIDX" + listed[6:]),
        "of floats": (content, listed[:17] + b"\7" + listed[18:]),
        "documents": (content, listed[:-8] + bytes(8)),
        "backwards": (content, listed[:-16] + b"\x09" + listed[-15:]),
        "below none": (content, listed[:34] + struct.pack("<3i", 36, 6, -2) + listed[46:]),
        "large": (content[:-4] + (300).to_bytes(4, "little"), listed),
        "negative": (content[:-4] + b"\xff" * 4, listed),
    }  # fmt: skip
    path.write_bytes(changed.get(damage, (content, listed))[0])
    index.write_bytes(changed.get(damage, (content, listed))[1])
    if damage == "no index":
        index.unlink()
    with pytest.raises(ConfigError, match=message):
        source(path, "tokens", least)


def test_a_pair_that_is_cut_after_its_digests_were_kept_is_refused(tmp_path: Path) -> None:
    path = pair(tmp_path / "a.bin", [[1, 2, 3, END] * 80])
    source(path, "tokens")
    before = path.stat()
    os.truncate(path, before.st_size - 4)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ConfigError, match=r"a\.bin was cut"):
        source(path, "tokens")
    assert len(folders(tmp_path)) == 1


def test_tokens_are_reused_until_their_data_or_what_made_them_change(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")

    def said(**changes: object) -> str:
        return source(path, **changes).notes[0].rpartition(", ")[2]

    assert "made in" in said()
    before = folders(tmp_path)[0].stat()
    assert said() == "reused"
    assert folders(tmp_path)[0].stat().st_ino == before.st_ino
    when = path.stat().st_mtime_ns
    os.utime(path, ns=(when, when + 1))
    assert "made in" in said()
    assert len(folders(tmp_path)) == 1, "those of the file as it was before are removed"
    with path.open("ab") as file:
        file.write(b'{"text": "one more"}\n')
    os.utime(path, ns=(when, when + 1))
    assert "made in" in said()
    # Another column or tokenizer has a separate folder; reading a folder finds none of them.
    path.write_text("".join(json.dumps({"text": t, "body": t[:9]}) + "\n" for t in TEXTS))
    said()
    assert "made in" in said(text_field="body")
    assert len(folders(tmp_path)) == 2
    assert "60 documents" in source(tmp_path).notes[0]


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "digests", "all"])
def test_tokens_of_which_a_file_is_cut_are_made_anew(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")
    wanted = train_batch(source(path), 0).ids
    (folder,) = folders(tmp_path)
    for file in folder.iterdir() if name == "all" else [folder / name]:
        os.truncate(file, file.stat().st_size // 2)
    again = source(path)
    assert "made in" in again.notes[0]
    assert torch.equal(train_batch(again, 0).ids, wanted)
    assert source(path).notes[0].endswith("reused")


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EROFS, ConfigError), (errno.EACCES, ConfigError),
                         (errno.ENOSPC, MachineError)],
)  # fmt: skip
def test_tokens_that_cannot_be_written_say_where_else_and_leave_nothing(
    number: int, kind: type[InternspError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "data", "jsonl")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        owner, name = (tokens.os, "fsync") if number == errno.ENOSPC else (Path, "rename")
        patched.setattr(owner, name, refuse)
        with pytest.raises(kind, match=rf"{os.strerror(number)}; give another folder by data\.cac"):
            source(path)
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["a.jsonl"]
    elsewhere = source(path, cache_dir=str(tmp_path / "place"))
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["a.jsonl"]
    assert len(list((tmp_path / "place").iterdir())) == 1
    assert torch.equal(train_batch(elsewhere, 0).ids, train_batch(source(path), 0).ids)


def test_a_folder_that_is_a_file_is_no_place(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written .*: Not a directory; give another f"):
        source(path, cache_dir=str(tmp_path / "file"))


def test_a_writer_that_dies_leaves_the_old_tokens_and_its_part_is_removed_later(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, "jsonl")
    source(path)
    (old,) = folders(tmp_path)
    code = (
        "import os, sys; from pathlib import Path; Path.rename = lambda *a: os._exit(9); "
        "from tests.unit.test_tokens import source; "
        "p = Path(sys.argv[1]); os.utime(p); source(p)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    (left,) = tmp_path.glob(".*.partial")
    assert folders(tmp_path) == sorted([old, left])
    assert TokenStore.mapped(old / "tokens.bin", old / "digests").lengths().size == 60
    (new,) = set(folders_after(path)) - {left}
    assert left.exists(), "it may be another writer's"
    for written in [*left.iterdir(), left]:
        os.utime(written, (time.time() - 4000,) * 2)
    assert folders_after(path) == [new], "also where nothing has to be made"


def folders_after(path: Path) -> list[Path]:
    source(path)
    return folders(path.parent)


def test_data_that_change_meanwhile_are_refused_and_tokens_opened_before_stay_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "jsonl")
    first = source(path)
    wanted = train_batch(first, 0).ids
    own = tokens.encoded

    def changing(*given: object) -> Iterator[object]:
        yield from own(*given)  # type: ignore[arg-type]
        with path.open("ab") as file:
            file.write(b'{"text": "later"}\n')

    os.utime(path, (1, 1))
    with monkeypatch.context() as patched:
        patched.setattr(tokens, "encoded", changing)
        with pytest.raises(ConfigError, match="was changed while its tokens were made"):
            source(path)
    assert not list(tmp_path.glob("*.partial"))
    source(path)
    assert len(folders(tmp_path)) == 1, "of the file as it is now"
    assert torch.equal(train_batch(first, 0).ids, wanted)


def test_several_that_make_the_same_tokens_at_once_all_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "jsonl")
    found: list[object] = []
    monkeypatch.setattr(tokens, "CACHED_BYTES", 0)

    def make() -> None:
        try:
            found.append(train_batch(source_of(path), 0).ids.tolist())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [train_batch(source(path, least=IN_MEMORY), 0).ids.tolist()] * 6
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("cut", [False, True])
def test_tokens_that_were_cut_are_made_anew_and_those_of_another_run_meanwhile_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    path, own, others = write(tmp_path, "jsonl"), tokens.encoded, []
    if cut:
        source(path)
        (folder,) = folders(tmp_path)
        (folder / "digests").write_bytes(b"")

    def as_another_run_makes_them(*given: Any) -> Any:
        yield from own(*given)
        monkeypatch.setattr(tokens, "encoded", own)
        source(path)
        others.append(folders(tmp_path)[0].stat().st_ino)

    monkeypatch.setattr(tokens, "encoded", as_another_run_makes_them)
    wanted = train_batch(source(path), 0).ids
    (folder,) = folders(tmp_path)
    assert [folder.stat().st_ino] == others
    assert torch.equal(train_batch(source(path), 0).ids, wanted)
    assert len(list(tmp_path.iterdir())) == 2, "nothing is left of what was in the way"


def test_only_tokens_of_what_is_large_are_on_disk(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")
    assert not source(path, least=path.stat().st_size + 1).notes
    assert source(path, least=path.stat().st_size).notes


_CHILD = """
import resource, sys
from pathlib import Path
from typing import Any
from tests.unit.test_tokens import source

kind, path, room = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
used = {k: int(v) for k, v in (l.split()[:2] for l in open("/proc/self/status") if "kB" in l)}
limit = used["VmData:"] * 1024 + room
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    bytearray(room + (8 << 20))
    sys.exit("the limit does not hold")
except MemoryError:
    pass
made = source(path, kind, int(sys.argv[4]), sequence_length=1 << 16)
rows = made.parts[0].train.per_epoch
total = sum(int(made.batch(range(taken, taken + 8)).ids.sum()) for taken in range(0, rows, 8))
print(rows, total)
"""


@pytest.mark.slow(6)
@pytest.mark.parametrize("kind", [pytest.param("text", marks=pytest.mark.thorough(12)), "jsonl"])
def test_a_file_several_times_larger_than_the_memory_that_is_left_is_tokenized_and_read(
    kind: str, tmp_path: Path
) -> None:
    """Under a limit (``RLIMIT_DATA``) too small to hold the tokens, a complete pass is read."""
    room, size = 48 << 20, 96 << 20
    path = tmp_path / "large.jsonl"
    line = "the same words again and again " * 64
    with path.open("w") as file:
        while file.tell() < size:
            row = f"{file.tell()} {line}\n"
            file.write(json.dumps({"text": row}) + "\n" if kind == "jsonl" else row)

    def child(least: int) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", _CHILD, kind, str(path), str(room), str(least)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}  # the limit counts the stacks of threads
        return subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=300, env=env
        )

    done = child(tokens.CACHED_BYTES)
    assert done.returncode == 0, done.stderr
    rows, total = map(int, done.stdout.split())
    assert rows << 16 > 0.85 * size
    assert total > 80 * (rows << 16), "the tokens themselves were read"
    assert room < size <= path.stat().st_size
    if kind == "text":
        refused = child(IN_MEMORY)
        assert refused.returncode
        assert "MemoryError" in refused.stderr


def test_tokens_of_a_long_name_have_a_place(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl").rename(tmp_path / ("x" * 240 + ".jsonl"))
    wanted = train_batch(source(path, least=IN_MEMORY), 0).ids
    assert torch.equal(train_batch(source(path), 0).ids, wanted)
    assert torch.equal(train_batch(source(path, cache_dir=str(tmp_path / "i")), 0).ids, wanted)


def test_a_large_text_without_words_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n" * 100)
    with pytest.raises(ConfigError, match="there is no text in"):
        source(tmp_path / "a.txt", "text")


def test_documents_of_one_token_leave_nothing_to_pad() -> None:
    given = DataConfig(sequence_length=4, held_out=0.0, pack=False)
    ones = TokenStore.in_memory([(np.ones(1, np.uint16), b"x" * 16)] * 3, np.uint16)
    with pytest.raises(ConfigError, match="two tokens of one document but the training text has 3"):
        Part(given, [ones], given, ByteTokenizer(), 0)

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from internsp.app.config import HELD_OUT, DataConfig, TrainConfig
from internsp.app.data import documents as sources
from internsp.app.data.batches import DataSource, split
from internsp.app.data.documents import paths_of, read_pieces, stdlib_documents
from internsp.app.data.order import Documents, Rows
from internsp.app.data.tokenizer import ByteTokenizer, Piece, load_tokenizer
from internsp.app.data.tokens import TokenStore, documents
from internsp.app.train.rows import micro_batch
from internsp.errors import ConfigError, MissingDependencyError
from tests.support.batches import train_batch

OWN_TEXT = Path(__file__).parents[1] / "data" / "text"
END = 256


def own_text(length: int = 64, seed: int = 0, batch: int = 4, **changes: object) -> DataSource:
    config = DataConfig(
        source="text", paths=(str(OWN_TEXT),), sequence_length=length, held_out=0.2, **changes
    )
    return DataSource(config, global_batch=batch, seed=seed)


def text_folder(folder: Path, *texts: str) -> DataConfig:
    for index, text in enumerate(texts):
        (folder / f"{index}.txt").write_text(text)
    return DataConfig(source="text", paths=(str(folder),), sequence_length=4, held_out=0.0)


def pieces_of(config: DataConfig) -> list[Piece]:
    return [piece for path in paths_of(config) for piece in read_pieces(config, path)]


def read_documents(config: DataConfig) -> list[bytes]:
    """Whole documents."""
    found = [b""]
    for piece in pieces_of(config):
        found[-1] += piece.text
        found += [b""] * piece.ends
    assert found.pop() == b""
    return found


def packed(source: DataSource, held_out: bool = False) -> Rows:
    part = source.parts[0]
    rows = part.held_out if held_out else part.train
    assert isinstance(rows, Rows)
    return rows


def tokens_of(rows: Rows) -> list[int]:
    return rows.documents.read(0, len(rows.documents)).tolist()


def stored(*contents: list[int], end: int | None = END) -> TokenStore:
    encoded = ((np.array(content, np.uint16), True) for content in contents)
    return TokenStore.in_memory(documents(encoded, end), np.uint16)


def test_documents_are_packed_end_to_end_with_an_end_token_and_their_starts(tmp_path: Path) -> None:
    source = DataSource(text_folder(tmp_path, "abc", "de"), global_batch=1, seed=0)
    tokens, starts = tokens_of(packed(source)), packed(source).documents.starts.tolist()
    first, second = [97, 98, 99, END], [100, 101, END]
    assert (tokens, starts) in [(first + second, [0, 4, 7]), (second + first, [0, 3, 7])]


def test_a_row_is_the_stream_from_its_begin_and_knows_the_documents_that_start_in_it() -> None:
    store = stored([4, 5, 6, 7], [1, 2], [3])
    # In another order than stored, over two stores.
    found = Documents([store, store], np.array([5, 8, 10]), np.array([3, 2, 5]), False)
    rows = Rows(found, 4, seed=0)
    assert [rows.cut(begin).ids.tolist() for begin in (0, 2, 3, 6)] == [
        [1, 2, END, 3], [END, 3, END, 4], [3, END, 4, 5], [5, 6, 7, END],
    ]  # fmt: skip
    starts = [[0, 3], [0, 1, 3], [0, 2], [0]]
    assert [rows.cut(begin).starts for begin in (0, 2, 3, 6)] == starts


def test_the_rows_of_all_ranks_and_micro_batches_together_are_the_global_batch() -> None:
    source = own_text(batch=12)
    whole = train_batch(source, 36)
    seen: list[list[int]] = []
    for index in range(3):
        for rank in range(2):
            mesh = SimpleNamespace(data=2, data_rank=rank)
            rows = micro_batch(index, TrainConfig(global_batch=12, micro_batches=3), mesh)
            part = train_batch(source, 36, rows)
            assert part.boundaries == whole.boundaries[rows]
            seen += part.ids.tolist()
    assert seen == whole.ids.tolist()


def test_one_pass_sees_no_token_twice_and_the_next_pass_is_cut_and_ordered_anew() -> None:
    source = own_text(batch=1)
    rows = packed(source).per_epoch
    passes = [packed(source).order(epoch).tolist() for epoch in (0, 1)]
    for begins in passes:
        assert np.all(np.diff(sorted(begins)) == 64)
        assert min(begins) >= 0
        assert max(begins) + 64 <= len(packed(source).documents)
    assert passes[0] != passes[1]
    assert passes[0][0] % 64 != passes[1][0] % 64
    last, following = train_batch(source, rows - 1).ids[0], train_batch(source, rows).ids[0]
    tokens = torch.tensor(tokens_of(packed(source)))
    assert torch.equal(last, tokens[passes[0][-1] :][:64])
    assert torch.equal(following, tokens[passes[1][0] :][:64])


def test_order_depends_on_the_seed_and_on_the_rows_taken_alone() -> None:
    one, same, other = own_text(seed=1), own_text(seed=1), own_text(seed=2)
    train_batch(same, 40)  # no state: earlier calls change nothing
    assert torch.equal(train_batch(one, 7).ids, train_batch(same, 7).ids)
    assert not torch.equal(train_batch(one, 7).ids, train_batch(other, 7).ids)
    assert not torch.equal(train_batch(one, 7).ids, train_batch(one, 8).ids)
    assert one.fingerprint == same.fingerprint
    assert tokens_of(packed(one, held_out=True)) == tokens_of(packed(other, held_out=True))
    assert one.fingerprint != other.fingerprint, "another order"


def test_held_out_documents_are_whole_chosen_by_content_and_not_in_the_training_text() -> None:
    contents = [list(f"document {i}".encode()) for i in range(40)]

    def parts(contents: list[list[int]]) -> list[set[bytes]]:
        store = stored(*contents)
        views = split(store.lengths(), store.digests, 0.1, 1)
        found = [[store.ids[b : b + n].tolist() for b, n in zip(*v, strict=True)] for v in views]
        assert all(document[-1] == END for part in found for document in part)
        assert [len(part) for part in found] == [36, 4]
        return [{bytes(document[:-1]) for document in part} for part in found]

    train, held = parts(contents)
    moved, held_again = parts(contents[::-1])
    assert held == held_again
    assert not held & (train | moved)


def test_of_few_documents_the_tail_of_each_is_held_out() -> None:
    store = stored([*range(100)], [7])
    train, held = split(store.lengths(), None, 0.05, 1)
    assert [part.tolist() for part in train] == [[0, 101], [95, 2]]
    assert [part.tolist() for part in held] == [[95], [6]]
    assert store.ids[95:101].tolist() == [*range(95, 100), END]
    train, held = split(store.lengths(), store.digests, 0.9, 1)
    assert sorted([*train[1], *held[1]]) == [2, 101], "one is held out, and one is trained on"


def test_held_out_batches_spread_over_the_text_and_repeat_only_when_it_is_short() -> None:
    source = own_text(length=32)
    available = packed(source, held_out=True).available
    source.global_batch = available // 2
    batches = list(source.evaluation(HELD_OUT, 2))
    assert len({tuple(row) for b in batches for row in b.ids.tolist()}) == available // 2 * 2
    source.global_batch = available
    assert [b.ids.shape[0] for b in source.evaluation(HELD_OUT, 3)] == [available] * 3
    source.global_batch = 4
    whole = next(source.evaluation(HELD_OUT, 1))
    halves = [next(source.evaluation(HELD_OUT, 1, slice(a, a + 2))).ids for a in (0, 2)]
    assert torch.equal(torch.cat(halves), whole.ids)
    assert whole.ids[0].tolist() == tokens_of(packed(source, held_out=True))[:32]


def test_nothing_is_held_out_when_the_share_is_zero(tmp_path: Path) -> None:
    source = DataSource(text_folder(tmp_path, "abcdefgh"), global_batch=1)
    assert source.evaluated == []
    assert train_batch(source, 0).ids.shape == (1, 4)


def test_the_standard_library_starts_quickly_and_is_the_same_every_time() -> None:
    start = time.perf_counter()
    source = DataSource(DataConfig(), global_batch=2)
    seconds = time.perf_counter() - start
    assert seconds < 5  # under one second when nothing else runs
    assert len(packed(source).documents) > 4_000_000
    assert packed(source).documents.read(0, 2).dtype == np.uint16
    first = next(stdlib_documents())
    assert first == next(stdlib_documents())
    assert sum(len(d) for d in stdlib_documents(limit=1000)) == 1000


def test_a_folder_is_read_in_sorted_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, data in {
        "z.md": b"last", "b/a.txt": b"first of b", "a.bin": b"a\0b", ".hidden/x": b"no",
        ".dot": b"no", "empty": b" \n",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(data)
    config = DataConfig(source="text", paths=(str(tmp_path), str(tmp_path / "z.md")))
    assert read_documents(config) == [b"last", b"first of b", b"last"]


def test_bytes_and_text_turn_into_each_other_whatever_the_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([0xC3, 0xA9, END, 65]) == "éA"
    assert tokenizer.decode([0xC3, 65]) == "\N{REPLACEMENT CHARACTER}A"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paths": ("gone/a",)}, "data.paths: gone/a cannot be read: No such file or directory"),
        ({"sequence_length": 100_000}, r"takes 100000 tokens but the training text has \d+"),
        ({"held_out": 0.001}, "held-out text has .* raise data.held_out"),
        ({"tokenizer": "gone.json"}, "'gone.json' is not a tokenizer: No such file"),
    ],
)
def test_mistakes_name_the_key_and_the_remedy(change: dict[str, object], message: str) -> None:
    values: dict[str, object] = {"source": "text", "paths": (str(OWN_TEXT),), **change}
    with pytest.raises(ConfigError, match=message):
        DataSource(DataConfig(**values), global_batch=2)


def test_empty_text_is_an_error_that_names_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no text in"):
        DataSource(text_folder(tmp_path, "", "  "), global_batch=1)


def test_batches_of_any_sizes_take_every_row_once_and_each_place_is_that_of_its_row() -> None:
    one, other = own_text(batch=2), own_text(batch=6)
    wanted = torch.cat([train_batch(one, taken).ids for taken in range(0, 12, 2)])
    found = torch.cat([train_batch(other, taken).ids for taken in (0, 6)])
    assert torch.equal(wanted, found)
    for row in range(12):
        document, token = one.position_of(row)
        begin = int(packed(one).documents.starts[document]) + token
        assert 0 <= begin < packed(one).documents.starts[document + 1]
        assert packed(one).documents.read(begin, 64).tolist() == wanted[row].tolist()


def test_without_the_extra_the_install_line_names_the_packages_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("pyarrow.parquet", "datasets", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(MissingDependencyError, match=r"'datasets': pip install datasets$"):
        read_documents(DataConfig(source="datasets", paths=(str(tmp_path),)))
    with pytest.raises(MissingDependencyError, match=r"'pyarrow': pip install pyarrow$"):
        read_documents(DataConfig(source="parquet", paths=(str(tmp_path),)))
    with pytest.raises(MissingDependencyError, match=r"'tokenizers': pip install tokenizers$"):
        load_tokenizer("any.json")


def test_rows_of_jsonl_and_parquet_files_are_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'data' is not installed")
    from pyarrow import parquet

    texts = ["one\ntwo", "drei", "", "quattro é"]
    lines = "\n".join(json.dumps({"body": text, "n": i}) for i, text in enumerate(texts))
    (tmp_path / "a.jsonl").write_text(lines)
    parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "a.parquet")
    expected = [text.encode() for text in texts if text]
    for source in ("jsonl", "parquet"):
        config = DataConfig(source=source, paths=(str(tmp_path),), text_field="body")
        assert read_documents(config) == expected
    with pytest.raises(ConfigError, match=r"no 'text'; it has \['body', 'n'\]"):
        read_documents(DataConfig(source="jsonl", paths=(str(tmp_path / "a.jsonl"),)))
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(ConfigError, match=r"no \.parquet file"):
        read_documents(DataConfig(source="parquet", paths=(str(tmp_path),)))


@pytest.mark.parametrize("end_name", ["</s>", "unusual"])
@pytest.mark.parametrize("last", [4, 300], ids=["without gaps", "ids have a gap"])
def test_a_tokenizers_file_gives_ids_and_text_and_the_end_of_a_document(
    last: int, end_name: str, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'data' is not installed")
    words = {"<unk>": 0, end_name: 1, "cut": 2, "every": 3, "weight": last}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    end = 1 if end_name == "</s>" else last + 1
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (end, max(last, end) + 1)
    assert tokenizer.encode("cut every head") == [2, 3, 0]
    assert tokenizer.decode([2, last, end]) == "cut weight"
    pieces = [Piece(b"weight", True), Piece(b"cut every", False)] * 300
    found = [(ids.tolist(), ends) for ids, ends in tokenizer.encode_pieces(pieces)]
    assert found == [([last], True), ([2, 3], False)] * 300
    latin = [Piece(b"weight", True), Piece("cut café".encode("latin-1"), True, "b.txt")]
    with pytest.raises(ConfigError, match=r"0xe9 of b.txt after 'cut caf' is not UTF-8.*save that"):
        [*tokenizer.encode_pieces(latin)]
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        load_tokenizer(str(tmp_path / "broken.json"))


@pytest.mark.parametrize("line", ["é" * 37 + "\n", "\N{WOMAN}\N{COMBINING ACUTE ACCENT}x"])
def test_a_large_text_is_read_in_pieces_cut_after_lines_or_between_characters(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = line.encode() * 50
    (tmp_path / "large.txt").write_bytes(content)
    (tmp_path / "blank.txt").write_bytes(b" " * 30)
    (tmp_path / "binary.txt").write_bytes(b"a" * 30 + b"\0" + b"a" * 300)
    (tmp_path / "end.txt").write_bytes(b"b" * 128)
    monkeypatch.setattr(sources, "PIECE_BYTES", 64)
    config = DataConfig(source="text", paths=(str(tmp_path),))
    assert read_documents(config) == [b"b" * 128, content]
    pieces = [piece.text for piece in pieces_of(config)]
    assert max(map(len, pieces)) <= 64
    assert "".join(piece.decode() for piece in pieces).endswith(line * 50)
    if line.endswith("\n"):
        assert all(piece.endswith((b"\n", b"b")) or len(piece) == 64 for piece in pieces if piece)

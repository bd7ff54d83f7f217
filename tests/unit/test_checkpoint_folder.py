"""Checkpoint folders and their manifests: by number, by one rename, refused if malicious."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from internsp.app.checkpoint import manifest
from internsp.app.checkpoint.checkpoint import Resumed
from internsp.app.checkpoint.disk import (
    LATEST,
    abandon_later,
    candidates,
    commit,
    discard_partial,
    folder_of,
    partial_of,
    steps_in,
    thin_out,
    write_part,
)
from internsp.app.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    canonical,
    check_files,
    digest_of,
    read,
    write_manifest,
)
from internsp.app.train.run_folder import RunFolder
from internsp.errors import ConfigError


def save(folder: Path, step: int, content: str = "new") -> Path:
    """A checkpoint of one file with its number as contents."""
    final = folder_of(folder, step)
    partial = partial_of(final, "a-1")
    write_part(partial, "data", memoryview(content.encode()))
    commit(partial, final)
    return final


def test_the_newest_is_found_by_number_and_not_by_text(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 5):
        save(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints" / "step-abc").mkdir()
    (tmp_path / "checkpoints" / "step-9999999.partial").mkdir()
    found = candidates(tmp_path)
    assert [path.name for path in found] == ["step-1000000", "step-999999", "step-000005"]
    assert candidates(tmp_path / "checkpoints") == found
    assert candidates(found[2]) == [found[2]]
    with pytest.raises(ConfigError, match="no checkpoint at"):
        candidates(tmp_path / "nothing")


@pytest.mark.parametrize("stop_at", range(1, 16))
def test_wherever_a_second_save_stops_one_whole_checkpoint_of_the_step_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """A process that dies before its n-th operation on the folder."""
    save(tmp_path, 5, "old")
    left = stop_at

    class Died(BaseException):
        pass

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Died
            return real(*args, **options)

        return operation

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", counted(os.fsync))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(Path, "mkdir", counted(Path.mkdir))
        patch.setattr(Path, "symlink_to", counted(Path.symlink_to))
        try:
            save(tmp_path, 5)
            died = False
        except Died:
            died = True
    texts = [(path / "data").read_text() for _, path in steps_in(tmp_path)]
    assert texts[0] in ("old", "new")
    assert died == (stop_at < 14)
    discard_partial(tmp_path)
    save(tmp_path, 5, "newest")
    assert sorted(p.name for p in tmp_path.iterdir()) == [LATEST, "step-000005"]
    assert (tmp_path / LATEST / "data").read_text() == "newest"
    assert (tmp_path / "step-000005" / "data").read_text() == "newest"


def test_a_half_written_checkpoint_is_none_and_goes_as_the_next_run_begins(tmp_path: Path) -> None:
    save(tmp_path, 5)
    partial = partial_of(folder_of(tmp_path, 10), "b-1")
    write_part(partial, "data", memoryview(b"half"))
    assert [step for step, _ in steps_in(tmp_path)] == [5]
    discard_partial(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [LATEST, "step-000005"]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [(0, 0, range(5, 45, 5)), (0, 20, range(5, 45, 5)), (1, 0, [40]), (2, 0, [35, 40]),
     (2, 10, [10, 20, 30, 35, 40]), (99, 0, range(5, 45, 5))],
)  # fmt: skip
def test_old_checkpoints_go_but_the_last_and_every_so_many_steps(
    tmp_path: Path, keep_last: int, keep_every: int, left: Sequence[int]
) -> None:
    for step in range(5, 45, 5):
        save(tmp_path, step)
    removed = thin_out(tmp_path, keep_last, keep_every)
    assert [step for step, _ in reversed(steps_in(tmp_path))] == list(left)
    assert sorted(removed) == [f"step-{s:06d}" for s in range(5, 45, 5) if s not in left]
    assert (tmp_path / LATEST).resolve().name == "step-000040"
    assert not list(tmp_path.glob("*.partial"))


def test_later_checkpoints_are_moved_with_the_rows_beside_them_and_no_more_found(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    for step in (5, 10, 15):
        save(folder, step, str(step))
    (tmp_path / "metrics.jsonl").write_text("rows")
    assert abandon_later(folder, 15) == ([], None)
    names, aside = abandon_later(folder, 5)
    assert (names, aside) == (["step-000010", "step-000015"], folder / "abandoned-1")
    assert aside is not None
    assert (aside / "metrics.jsonl").read_text() == "rows"
    assert (aside / "step-000015" / "data").read_text() == "15"
    assert [path.name for path in candidates(tmp_path)] == ["step-000005"]
    assert os.readlink(folder / LATEST) == "step-000005"
    save(folder, 10)
    assert abandon_later(folder, 5)[1] == folder / "abandoned-2"


def whole(folder: Path) -> dict[str, Any]:
    """A manifest of one tensor in two chunks, as JSON, and the file that it lists."""
    folder.mkdir(exist_ok=True)
    (folder / "rank-00000.safetensors").write_bytes(bytes(range(64)))
    digest = hashlib.sha256(bytes(range(64))).hexdigest()
    chunk = {"sizes": [2, 3], "file": "rank-00000.safetensors", "length": 24}
    return {
        "format": 2, "step": 5, "run": "20260101-000000-abcd", "mesh": {"world": 2},
        "config": {"train": {"seed": 3, "name": "ü"}},
        "data": {"fingerprint": "f", "sequences": 40, "tokens": 900, "document": 3, "token": 7},
        "loss_scaler": {"scale": 2.0**16, "good_steps": 3, "skipped_steps": 0},
        "values": {"optimizer.x": 1e-5},
        "tensors": {
            "w": {
                "dtype": "float32", "shape": [4, 3],
                "chunks": [
                    {**chunk, "offsets": [0, 0], "begin": 0},
                    {**chunk, "offsets": [2, 0], "begin": 32},
                ],
            }
        },
        "files": {"rank-00000.safetensors": {"nbytes": 64, "sha256": digest}},
    }  # fmt: skip


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    made = Manifest.model_validate(whole(tmp_path))
    write_manifest(tmp_path, made.model_dump(mode="json"))
    assert read(tmp_path) == made
    check_files(tmp_path, made, made.files)


def damage(folder: Path, made: Manifest) -> str:
    """What is told of a folder whose files are not as they were written."""
    with pytest.raises(ConfigError) as refused:
        check_files(folder, made, made.files)
    return str(refused.value)


def test_every_flipped_bit_of_manifest_and_file_is_noticed(tmp_path: Path) -> None:
    made = Manifest.model_validate(whole(tmp_path))
    write_manifest(tmp_path, made.model_dump(mode="json"))
    path = tmp_path / MANIFEST
    right = path.read_bytes()
    for place in range(len(right)):
        flipped = bytearray(right)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        was, now = chr(right[place]), chr(flipped[place])
        if (was == " " and now.isspace()) or was.lower() == now.lower():
            with suppress(ConfigError):  # equal in JSON: 1e-05 as 1E-05, \u00fc as \u00FC
                assert read(tmp_path) == made
        else:
            with pytest.raises(ConfigError, match=str(path)):
                read(tmp_path)
    data = tmp_path / "rank-00000.safetensors"
    right = data.read_bytes()
    for place in range(len(right)):
        flipped = bytearray(right)
        flipped[place] ^= 1 << place % 8
        data.write_bytes(flipped)
        assert damage(tmp_path, made) == f"{data} is damaged: its sha256 does not match"
    data.write_bytes(right[:-1])
    assert damage(tmp_path, made) == f"{data} has 63 bytes, 64 were written"
    data.unlink()
    assert damage(tmp_path, made) == f"{data} is missing"
    data.symlink_to("/dev/zero")
    assert damage(tmp_path, made) == f"{data} is not a regular file"


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *parents, last = [int(p) if p.isdigit() else p for p in path.split("/")]
        at: Any = content
        for part in parents:
            at = at[part]
        at[last] = value

    return change


HOSTILE = [
    ("tensors/w/chunks/0/file", "../../etc/passwd"),
    ("tensors/w/chunks/0/file", "/etc/passwd"),
    ("tensors/w/chunks/0/file", ".."),
    ("files/..", {"nbytes": 1, "sha256": "0" * 64}),
    ("files/a\0b", {"nbytes": 1, "sha256": "0" * 64}),
    ("files/a\n", {"nbytes": 1, "sha256": "0" * 64}),
    ("tensors/w/chunks/0/file", "rank-00009.safetensors"),
    ("tensors/w/chunks/0/begin", 41),
    ("tensors/w/chunks/0/begin", 1),
    ("tensors/w/chunks/0/length", 10**30),
    ("tensors/w/chunks/0/length", -1),
    ("tensors/w/chunks/0/length", 8),
    ("tensors/w/chunks/0/length", 32),
    ("data/sequences", -1),
    ("mesh/world", 0),
    ("mesh", {}),
    ("tensors/w/chunks/0/offsets", [1, 0]),
    ("tensors/w/chunks/0/offsets", [-2, 0]),
    ("tensors/w/chunks/0/offsets", [0]),
    ("tensors/w/chunks/1/offsets", [3, 0]),
    ("tensors/w/chunks", []),
    ("tensors/w/shape", [10**15, 10**15]),
    ("tensors/w/shape", [1] * 1000),
    ("tensors/w/dtype", "object"),
    ("step", -1),
    ("step", 10**20),
    ("step", 5.5),
    ("step", True),
    ("format", "2"),
    ("run", "x\x1b[2J"),
    ("config", []),
    ("more", 1),
]


@pytest.mark.parametrize(("where", "value"), HOSTILE, ids=[f"{w}={v!r:.30}" for w, v in HOSTILE])
def test_a_hostile_manifest_with_a_right_digest_is_refused_by_name(
    tmp_path: Path, where: str, value: Any
) -> None:
    content = whole(tmp_path)
    _set(where, value)(content)
    path = tmp_path / MANIFEST
    document = {"sha256": digest_of(canonical(content)), "content": content}
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError) as refused:
        read(tmp_path)
    assert str(refused.value).startswith(f"{path} is not a manifest: ")
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize("number", [1, 3])
def test_another_versions_format_is_told(tmp_path: Path, number: int) -> None:
    content = {**whole(tmp_path), "format": number, "more": 1}
    document = {"sha256": digest_of(canonical(content)), "content": content}
    (tmp_path / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=f"is of format {number}, this version of internsp reads"):
        read(tmp_path)


def written(checkpoints: Path, step: int) -> Path:
    """A checkpoint with a manifest, which ``latest`` points to."""
    final, partial = folder_of(checkpoints, step), partial_of(folder_of(checkpoints, step), "a-1")
    partial.mkdir(parents=True)
    write_manifest(partial, {**whole(partial), "step": step})
    commit(partial, final)
    return final


def copied(checkpoints: Path) -> Path:
    """``latest`` as a folder, as in a copy that followed links."""
    target = (checkpoints / LATEST).resolve()
    (checkpoints / LATEST).unlink()
    shutil.copytree(target, checkpoints / LATEST)
    return checkpoints / LATEST


def go_on(run: Path, path: Path, step: int) -> list[str]:
    """The notes of a run that begins in its own folder after it has loaded ``path``."""
    content = Manifest.model_validate({**whole(run), "step": step})
    name, notes = RunFolder(run, "run", None)._begin(Resumed(path, content, []))
    assert name == content.run
    return notes


def test_a_save_makes_latest_a_link_again_and_keeps_the_folder_that_it_had_become(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    older = written(folder, 5)
    latest = copied(folder)
    assert candidates(latest) == [latest], "a checkpoint as any other, if it is named"
    assert candidates(tmp_path) == [older]
    assert go_on(tmp_path, older, 5) == []
    written(folder, 10)
    assert os.readlink(latest) == "step-000010"
    (kept,) = folder.glob("latest-copied-*")
    assert read(kept).step == 5


def test_no_checkpoint_is_left_beside_a_latest_that_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    written(folder, 5)
    latest = copied(folder)
    names, aside = abandon_later(folder, 3)
    assert (names, aside) == (["step-000005"], folder / "abandoned-1")
    assert read(latest).step == 5, "nothing that a run has not written is removed"


@pytest.mark.parametrize("target", ["step-000007", "/", "latest", "x" * 200, "\udcff"])
def test_a_latest_that_names_no_checkpoint_is_refused_and_passed_over(
    tmp_path: Path, target: str
) -> None:
    folder = tmp_path / "checkpoints"
    older, found = written(folder, 5), written(folder, 6)
    latest = folder / LATEST
    assert candidates(latest) == [found]
    latest.unlink()
    latest.symlink_to(target)
    with pytest.raises(ConfigError, match=r"no checkpoint at|manifest\.json is missing"):
        read(candidates(latest)[0])
    assert candidates(folder) == [found, older]
    assert go_on(tmp_path, found, 6) == []
    written(folder, 10)
    assert os.readlink(latest) == "step-000010"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1]", b"[" * 100_000, b"9" * 100_000, b'{"sha256": 1, "content": 2}', b"\xff",
     b'{"sha256": "", "content": {"\\ud800": 1}}', b'{"sha256": "", "content": {"x": Infinity}}'],
    ids=["empty", "torn", "list", "deep", "long", "types", "bytes", "surrogate", "infinity"],
)  # fmt: skip
def test_a_file_that_is_no_manifest_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / MANIFEST
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=str(path)):
        read(tmp_path)


def test_an_absurd_size_and_a_link_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    with path.open("wb") as file:
        file.truncate(manifest.MAX_BYTES + 1)
    with pytest.raises(ConfigError, match="more than any manifest has"):
        read(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="not a regular file"):
        read(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match="saving did not end"):
        read(tmp_path)

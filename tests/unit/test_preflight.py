"""Checks before ranks start: folders, disks, memory, devices, text; and their messages."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from internsp.app import cli
from internsp.app.config import Config
from internsp.app.data.batches import DataSource
from internsp.app.launch import preflight
from internsp.app.launch.launch import advice
from internsp.app.launch.preflight import check_before_start, device_mistakes, errors_in_words
from internsp.app.process.rank_log import log_path
from internsp.app.train.run_folder import set_aside
from internsp.errors import (
    ConfigError,
    InternspError,
    MachineError,
    MissingDependencyError,
    StructureError,
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def small(**changes: dict[str, object]) -> Config:
    values: dict[str, dict[str, object]] = {
        "model": {"hidden_size": 16, "layers": 1, "heads": 2},
        "data": {"sequence_length": 8},
        "parallel": {"device": "cpu"},
    }
    for name, keys in changes.items():
        values[name] = values.get(name, {}) | keys
    return Config.model_validate(values)


def told(config: Config, output: str = "out", kind: type[InternspError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        check_before_start(config, Path(output))
    return str(caught.value)


def test_a_run_that_can_start_leaves_nothing_behind() -> None:
    check_before_start(small(), Path("a/b/c"))
    assert list(Path().iterdir()) == []


def test_owners_of_experts_to_which_no_model_sends_tokens_are_refused() -> None:
    wrong = small(parallel={"expert": 2}, launch={"processes": 2}, train={"global_batch": 2})
    assert "the mesh has an axis for experts" in told(wrong, kind=StructureError)
    as_experts = {"weight_parallel": {"expert_parameters": ["feed_forward"]}}
    changes = {"launch": {"processes": 2}, "train": {"global_batch": 2}, **as_experts}
    wrong = small(parallel={"expert": 2}, **changes)
    assert "does not declare that it sends tokens to the owners of layers.0.f" in told(
        wrong, kind=StructureError
    )
    check_before_start(small(parallel={"weight": 2, "expert_weight": 1}, **changes), Path("out"))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"options": ["amsgrat = true"]}, "'amsgrat'; it takes betas, eps, amsgrad, maximize"),
        ({"options": ["amsgrad = true", "amsgrad = false"]}, "options: amsgrad is given twice"),
        ({"name": "sgd", "options": ["nesterov = true"]}, "options: sgd: Nesterov momentum"),
        ({"name": "muon", "options": ['adjust_lr_fn = "x"']}, "options: muon: Adjust learning"),
        ({"name": "no:Such"}, "optimizer.name = 'no:Such': there is no such function or class"),
    ],
)
def test_what_an_optimizer_does_not_take_is_told_before_ranks_start(
    given: dict[str, object], wanted: str
) -> None:
    assert wanted in told(small(optimizer=given))


def test_an_output_that_cannot_be_a_folder_is_refused() -> None:
    Path("file").write_text("")
    Path("link").symlink_to("nowhere")
    no_folder = "cannot be written: Not a directory"
    assert told(small(), "file") == f"--output: file {no_folder}"
    assert told(small(), "file/below") == f"--output: file/below {no_folder}"
    assert told(small(), "link").endswith("cannot be written: No such file or directory")
    assert told(small(), "x" * 300).endswith("cannot be written: File name too long")
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text("an older run, which is moved as a whole")
    check_before_start(small(), Path("run"))
    assert [path.name for path in Path("run").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("given", [".", "..", "../../here", "link"])
def test_the_current_folder_is_not_moved_with_what_else_is_in_it(monkeypatch, given: str) -> None:
    Path("here/below").mkdir(parents=True)
    Path("here/below/link").symlink_to("../../here")
    for folder in ("here", "here/below"):
        Path(folder, "metrics.jsonl").write_text("an older run")
    monkeypatch.chdir("here/below")
    refused = pytest.raises(ConfigError, match=r"current folder or above .* --output, or resume")
    with refused:
        set_aside(Path(given))
    assert Path("metrics.jsonl").samefile("../../here/below/metrics.jsonl")
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text("an older run")
    with monkeypatch.context() as mounted, refused:
        mounted.setattr(Path, "is_mount", lambda path: path.name == "run")
        set_aside(Path("run"))
    assert set_aside(Path("run")) == Path("run.1")


@pytest.mark.parametrize("name", ["config.toml", "checkpoints", "report.html"])
def test_what_no_run_has_written_is_neither_overwritten_nor_moved(name: str) -> None:
    """`internsp train here/config.toml --output here`."""
    Path("here").mkdir()
    Path("here", name).write_text("mine")
    with pytest.raises(ConfigError, match=f"here has {name}, which no run has written, and would"):
        set_aside(Path("here"))
    assert Path("here", name).read_text() == "mine"
    log_path(Path("here"), 0).parent.mkdir()
    log_path(Path("here"), 0).write_text("of a run that was killed before its first step")
    set_aside(Path("here"))


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, MachineError), (errno.EDQUOT, MachineError), (errno.EACCES, ConfigError),
     (errno.EROFS, ConfigError)],
)  # fmt: skip
def test_a_folder_that_is_full_or_closed_is_told_by_what_the_system_says(monkeypatch, code, kind):
    def scratch(folder: Path) -> None:
        if folder == Path.cwd():
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(preflight, "_make_file", scratch)
    assert told(small(), kind=kind) == f"--output: out cannot be written: {os.strerror(code)}"


def test_a_device_that_is_missing_is_told(monkeypatch) -> None:
    def mistakes(devices: int, **environment: str) -> list[str]:
        monkeypatch.setattr(preflight, "_devices", lambda wanted: devices)
        config = small(parallel={"device": device}, launch={"processes": 4})
        return [str(error) for error in device_mistakes(config, environment)]

    device = "cuda"
    assert "torch finds no CUDA device" in mistakes(0)[0]
    assert mistakes(4) == []
    assert "4 processes need a device each and this machine has 2" in mistakes(2)[0]
    assert mistakes(2, LOCAL_WORLD_SIZE="2") == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "a launcher's, which has not started this process")
    check_before_start(small(), Path("out"))
    device = "auto"
    assert mistakes(0) == []
    assert "start 2" in mistakes(2)[0]
    device = "cpu"
    assert mistakes(0) == mistakes(2) == []


def test_a_text_is_read_before_the_ranks_would_and_all_mistakes_are_told_at_once(monkeypatch):
    Path("rows.jsonl").write_text('{"text": "one and some"}\n{"text": "cut')
    Path("cut.jsonl").write_text('{"text": "cut')
    Path("file").write_text("")
    wrong = small(data={"source": "jsonl", "paths": ["rows.jsonl"], "held_out": 0.0})
    first, second = told(wrong, "file").split("\n  ")
    assert first == "--output: file cannot be written: Not a directory"
    assert second.startswith("data.paths: rows.jsonl, row 2 is not JSON")
    monkeypatch.setattr(preflight, "_SMALL_TEXT", 10)
    check_before_start(wrong, Path("out"))  # the run itself finds it
    first_row = small(data={"source": "jsonl", "paths": ["cut.jsonl"], "held_out": 0.0})
    assert told(first_row).startswith("data.paths: cut.jsonl, row 1 is not JSON"), "of a large one"
    short = small(data={"source": "text", "paths": ["file"]})
    assert told(short).startswith("data: there is no text in ['file']")


RULE = {"match": ["layers.*.nothing"], "shard_dim": 1}
DEAD: list[tuple[dict[str, dict[str, object]], str]] = [
    ({"weight_parallel": {"blocks": ["nothing.*"]}}, "weight_parallel.blocks: 'nothing.*'"),
    ({"weight_parallel": {"gather_before_modules": ["nothing"]}},
     "weight_parallel.gather_before_modules"),
    ({"weight_parallel": {"expert_parameters": ["nothing"]}},
     "weight_parallel.expert_parameters: 'nothing'"),
    ({"weight_parallel": {"rules": [RULE]}}, "'layers.*.nothing'"),
    ({"optimizer": {"groups": [{"match": ["nothing"], "lr": 0.1}]}}, "optimizer.groups: group 1"),
]  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("given", "expected"), DEAD, ids=[text for _, text in DEAD])
def test_a_pattern_that_matches_nothing_is_told_before_processes_start(
    given: dict[str, dict[str, object]], expected: str, stages: int
) -> None:
    sizes: dict[str, dict[str, object]] = {
        "model": {"hidden_size": 16, "layers": 2, "heads": 2},
        "parallel": {"device": "cpu", "pipeline": stages}, "launch": {"processes": stages},
        "train": {"global_batch": 2, "micro_batches": 2},
    }  # fmt: skip
    with pytest.raises(InternspError) as caught:
        check_before_start(Config.model_validate(sizes | given), Path("out"))
    assert expected in str(caught.value)


def test_a_missing_kernel_and_a_folder_of_other_weights_are_told_too(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    flash = small(model={"hidden_size": 16, "layers": 1, "heads": 2, "attention": "flash"})
    text = told(flash, kind=MissingDependencyError)
    assert text.startswith("Attention kernel 'flash': flash-attn is not installed")
    Path("stored").mkdir()
    heads = {"num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 300}
    sizes = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, **heads}
    Path("stored/config.json").write_text(json.dumps(sizes))
    head = json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    packed = len(head).to_bytes(8, "little") + head.encode() + bytes(4)
    Path("stored/model.safetensors").write_bytes(packed)
    given = Config.model_validate(
        {"model": {"path": "stored"}, "data": {"sequence_length": 8}, "parallel": {"device": "cpu"}}
    )
    assert told(given).startswith("model.path: stored has no ")


def test_where_no_rank_has_begun_no_log_is_named(tmp_path) -> None:
    assert advice(tmp_path, {0: 1, 1: 2}, "again") == ""
    (tmp_path / "checkpoints" / "step-000003").mkdir(parents=True)
    lines = advice(tmp_path, {1: 2}, "again").splitlines()
    assert lines[0] == "  rank 1 had not begun to train: it has no log yet"
    assert lines[1:] == ["  to go on after step 3: again"]


def test_packages_are_named_themselves(monkeypatch) -> None:
    for package in ("tokenizers", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, package, None)
    Path("a.parquet").write_bytes(b"")
    Path("t.json").write_text("{}")
    wanted = small(data={"source": "parquet", "paths": ["a.parquet"]})
    assert told(wanted, kind=MissingDependencyError).endswith(
        "needs the package 'pyarrow': pip install pyarrow"
    )
    wanted = small(data={"tokenizer": "t.json"})
    assert told(wanted, kind=MissingDependencyError).endswith("pip install tokenizers")


def test_a_vocabulary_that_is_too_small_and_documents_without_a_token_are_refused() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'data' is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.normalizer = tokenizers.normalizers.Replace("x", "")
    made.save("t.json")
    Path("rows.jsonl").write_text("".join('{"text": "xx"}\n' for _ in range(50)))
    data = {"source": "jsonl", "paths": ["rows.jsonl"], "tokenizer": "t.json"}
    assert "data.tokenizer finds no token in it" in told(small(data=data))
    with Path("rows.jsonl").open("a") as file:
        file.write('{"text": "' + "a " * 400 + '"}\n')
    source = DataSource(small(data=data | {"held_out": 0.0}).data, global_batch=2)
    # A document without tokens is skipped with its end token: a batch could hold end tokens only.
    found = source.parts[0].train.documents
    assert found.read(0, len(found)).tolist() == [0] * 400 + [1]
    assert "model.vocab_size: 1 is less than the 2 ids" in told(
        small(data=data, model={"hidden_size": 16, "vocab_size": 1})
    )


def test_failures_of_files_and_memory_in_a_rank_are_one_line() -> None:
    def fail(error: BaseException) -> InternspError:
        with pytest.raises(InternspError) as caught, errors_in_words():
            raise error
        assert caught.value.__cause__ is error
        return caught.value

    full = fail(OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl"))
    assert str(full) == "runs/a/metrics.jsonl: No space left on device"
    assert full.exit_status == 3
    assert fail(PermissionError(errno.EACCES, "Permission denied", "x")).exit_status == 2
    assert str(fail(MemoryError())) == "out of memory"
    with (
        pytest.raises(MachineError, match="can't allocate memory: you tried to allocate"),
        errors_in_words(),
    ):
        torch.zeros(1 << 58)
    for other in (ValueError("x"), ConnectionResetError(errno.EPIPE, "reset"), RuntimeError("x"),
                  FileNotFoundError(errno.ENOENT, "a mistake of ours", "y")):  # fmt: skip
        with pytest.raises(type(other)), errors_in_words():
            raise other


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (["--output", "file"], 2, "internsp: --output: file cannot be written: Not a directory\n"),
        (["--parallel.device", "cuda"], 3, "torch finds no CUDA device"),
        (["--data.source", "jsonl", "--data.paths", "file"], 2, "data: there is no text in"),
    ],
)
def test_the_command_ends_with_the_status_and_starts_nothing(
    monkeypatch, capsys, words, status, expected
) -> None:
    monkeypatch.setattr("internsp.app.launch.launch.start", None)  # would raise if called
    monkeypatch.setattr(preflight, "_devices", lambda wanted: 0)
    Path("file").write_text("")
    Path("run.toml").write_text("")
    assert cli.main(["train", "run.toml", *words]) == status
    assert expected in capsys.readouterr().err


def test_a_closed_standard_output_is_no_traceback(monkeypatch, capfd) -> None:
    Path("run.toml").write_text("")
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit):  # as rich ends a program whose reader has closed the pipe
            cli.main(["plan", "run.toml"])
    with open("/dev/full", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(["plan", "run.toml"]) == 3
    assert capfd.readouterr().err == "internsp: standard output: No space left on device\n"

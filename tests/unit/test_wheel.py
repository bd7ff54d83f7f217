"""Installed, not only cloned: a wheel of the checkout in a separate folder trains the demo."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import internsp
from internsp.app import cli

ROOT = Path(__file__).parents[2]
SOURCES = ("internsp", "model_zoo", "configs", "pyproject.toml", "README.md", "LICENSE")
QUICK = [
    "--train.steps=1", "--train.eval_batches=0", "--model.layers=2",
    "--model.hidden_size=32", "--data.sequence_length=32", "--checkpoint.save=false",
]  # fmt: skip


def run(*words: str, **options: object) -> str:
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, **options
    )  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by pip from a copy, so that the checkout is not changed; nothing is downloaded."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skip)
        else:
            shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("dist")
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run("-m", "pip", "wheel", *offline, "--wheel-dir", str(out), str(source))
    return next(out.glob("*.whl"))


@pytest.mark.slow(3)
def test_a_wheel_says_what_it_is_and_installs_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = next(name for name in names if name.endswith("/METADATA"))
        metadata = message_from_bytes(archive.read(about))
    info = Path(about).parent.name
    assert {Path(name).parts[0] for name in names} == {"internsp", info}
    assert metadata["Version"] == internsp.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{info}/licenses/LICENSE" in names
    assert metadata["Project-URL"].startswith("Paper, https://")
    assert metadata.get_payload().startswith("# ")
    for path in ("py.typed", "model_zoo/llama.py", "bundled/demo.toml", "wp/README.md"):
        assert f"internsp/{path}" in names
    assert not [line for line in metadata.get_all("Requires-Dist") if line.startswith("setuptools>")
                and "extra" not in line]  # fmt: skip


@pytest.mark.slow(8)
def test_an_installed_wheel_writes_a_configuration_and_trains_it(
    wheel: Path, tmp_path: Path
) -> None:
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile",
        "--target", str(site), str(wheel))  # fmt: skip
    alone = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "PYTHONDONTWRITEBYTECODE")
    }
    around = {"cwd": here, "env": {**alone, "PYTHONPATH": str(site)}}
    code = "from importlib.util import find_spec; print(find_spec('internsp').origin)"
    found = run("-P", "-c", code, **around).strip()
    assert found == str(site / "internsp" / "__init__.py"), "and below it is the zoo that trains"
    command = str(site / "bin" / "internsp")
    said = run(command, "init", "first", **around)
    assert said.splitlines() == ["wrote first/demo.toml", "next: internsp train first/demo.toml"]
    assert "# " in (here / "first" / "demo.toml").read_text()
    said = run(command, "train", "first/demo.toml", *QUICK, **around)
    assert "weight 2" in said
    assert len((here / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()) == 1


def test_init_writes_any_bundled_configuration_and_overwrites_none(tmp_path, capsys) -> None:
    for path in (ROOT / "configs").glob("*.toml"):
        assert cli.main(["init", str(tmp_path / "a"), "--config", path.stem]) == 0
        written = (tmp_path / "a" / path.name).read_text()
        assert written == path.read_text()
        named = re.findall(r"[\w./-]+\.(?:toml|md|py)\b", written)
        assert set(named) <= {path.name}, "its comments name no file but itself"
    capsys.readouterr()
    assert cli.main(["init", str(tmp_path / "a")]) == 2
    assert "demo.toml is there already" in capsys.readouterr().err
    named = tmp_path / "two words" / "own.toml"
    assert cli.main(["init", str(named)]) == 0
    assert f"next: internsp train '{named}'\n" in capsys.readouterr().out
    assert named.read_text() == (tmp_path / "a" / "demo.toml").read_text()
    assert cli.main(["init", str(named)]) == 2
    assert cli.main(["init", str(tmp_path), "--config", "dmeo"]) == 2
    said = capsys.readouterr().err
    assert "there are deepseek_16b, demo, documented, " in said
    assert "long_demo, moe_demo, pipeline_demo, qwen3_30b_a3b, single" in said
    (tmp_path / "file").write_text("")
    assert cli.main(["init", str(tmp_path / "file" / "b")]) == 3
    assert "Not a directory" in capsys.readouterr().err


def test_the_zoo_has_two_names_in_a_checkout_and_is_there_once() -> None:
    assert importlib.import_module("model_zoo") is importlib.import_module("internsp.model_zoo")
    parts = {
        "common", "deepseek", "families", "generate", "internlm2", "llama", "llama_form", "mixtral",
        "mixture_form",
    }  # fmt: skip
    for part in sorted(parts):
        inside = importlib.import_module(f"internsp.model_zoo.{part}")
        assert importlib.import_module(f"model_zoo.{part}") is inside
    there = {path.stem for path in (ROOT / "model_zoo").glob("*.py")}
    assert there == parts | {"__init__"}, "model_zoo/__init__.py names its files"

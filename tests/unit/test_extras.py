"""Without the extra ``[train]``: three packages serve the library; the command says what lacks."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from internsp.app.cli import main
from internsp.base.extras import PACKAGES, explained
from internsp.errors import MissingDependencyError

ROOT = Path(__file__).parents[2]


def needed(names: list[str]) -> set[str]:
    """The distributions ``names``, and all that they require here."""
    found: set[str] = set()
    for name in names:
        required = importlib.metadata.requires(name) or []
        rules = [rule for text in required if (rule := Requirement(text))]
        own = [r.name for r in rules if r.marker is None or r.marker.evaluate({"extra": ""})]
        found |= {name} | needed([each for each in own if each not in found])
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with links to those packages and internsp, and to nothing else."""
    site = tmp_path_factory.mktemp("site")
    (site / "internsp").symlink_to(ROOT / "internsp")
    own = [Requirement(text) for text in importlib.metadata.requires("internsp") or []]
    for name in needed([r.name for r in own if r.marker is None]):
        for file in importlib.metadata.distribution(name).files or []:
            top = file.parts[0]
            if top != ".." and not (site / top).is_symlink():
                (site / top).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)
    return site


def python(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "RANK"))}
    return subprocess.run(
        [sys.executable, "-S", *words], capture_output=True, text=True, timeout=120,
        env={**variables, "PYTHONPATH": str(site)}, cwd=site,
    )  # fmt: skip


@pytest.mark.slow(8)
def test_torch_numpy_and_pydantic_are_enough_to_train_a_parallel_model(bare: Path) -> None:
    program = """
        import torch, internsp, internsp.model_zoo.llama
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.proj = torch.nn.Linear(64, 64)
            def forward(self, x):
                return x + self.proj(x)
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.ModuleList([Block(), Block()])
            def forward(self, x):
                return self.layers[1](self.layers[0](x))
        model = Model()
        mesh = internsp.ParallelMesh.create(weight=1, device_type="cpu")
        communicator = internsp.parallelize(model, mesh)
        optimizer = internsp.ZeroOptimizer(communicator, torch.optim.SGD, lr=0.1)
        before = model.layers[0].proj.weight.full_tensor().clone()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        print("moved", bool((model.layers[0].proj.weight.full_tensor() != before).all()))
    """
    done = python(bare, "-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "moved True\n"


@pytest.mark.slow(3)
def test_the_command_and_the_trainer_say_what_to_install(bare: Path) -> None:
    done = python(bare, "-m", "internsp", "train", "demo.toml")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("internsp: the command needs ")
    assert done.stderr.endswith("which is not installed: pip install 'internsp[train]'\n")
    done = python(bare, "-c", "import internsp; internsp.Trainer")
    assert "MissingDependencyError: internsp.Trainer needs " in done.stderr


def test_ctrl_c_while_the_command_is_loaded_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "internsp.app.cli.command":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "internsp.app.cli.command", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert main(["train", "demo.toml"]) == 130


def test_another_missing_module_keeps_its_own_words() -> None:
    error = ModuleNotFoundError("No module named 'bitsandbytes'", name="bitsandbytes")
    assert explained(error, "the command") is error
    inner = ModuleNotFoundError("No module named 'rich.table'", name="rich.table")
    assert isinstance(explained(inner, "the command"), MissingDependencyError)


def test_the_packages_are_those_of_the_extra() -> None:
    rules = [Requirement(text) for text in importlib.metadata.requires("internsp") or []]
    extra = [r.name for r in rules if r.marker is not None and "train" in str(r.marker)]
    assert sorted(name.replace("-", "_") for name in extra) == sorted(PACKAGES)

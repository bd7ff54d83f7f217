"""``internsp export``: write a run's newest checkpoint as a folder that ``transformers`` loads.

One tensor is in memory at a time.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from internsp.app.checkpoint import manifest
from internsp.app.checkpoint.disk import PARTIAL, candidates, newest_whole, sync
from internsp.app.checkpoint.files import Reader, header_of
from internsp.app.checkpoint.manifest import MANIFEST, Manifest
from internsp.app.config import Config
from internsp.app.config.resume import saved_config
from internsp.app.data.tokenizer import byte_tokenizer_files, load_tokenizer, tokenizer_files
from internsp.app.models.factory import form_of
from internsp.app.session.own import CustomData
from internsp.errors import ConfigError

MAX_FILE_BYTES = 4 << 30
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True)
class _ExportTensor:
    """A tensor of the export: name, shape, dtype, and the checkpoint's tensor it is made from."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: str | None
    convert: Callable[[Tensor], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


def export(run: Path, to: Path, max_file_bytes: int = MAX_FILE_BYTES) -> list[str]:
    """Write the weights of ``run`` (folder of a run or of a checkpoint) to the new folder ``to``.

    Runs on one process and holds one tensor at a time. ``to`` exists only when it is complete.

    Returns:
        Messages for the user: the checkpoint, checkpoints that were skipped, the folder.

    Raises:
        ConfigError: there is no complete checkpoint, or ``to`` exists.
    """
    if to.exists():
        raise ConfigError(f"--to: there is something at {to} already")
    folder, content, config, notes = newest(run)
    hf = config.model.family == "hf"
    if not hf and (why := form_of(config.model).why_not(config.model)):
        raise ConfigError(
            f"transformers has no family that computes what this {config.model.family} of the zoo "
            f"does: {why}; use the run itself (internsp generate), or train a folder of "
            'transformers (model.family = "hf"), which is exported'
        )
    parts = list(_tensors(config, content))
    tokenizer, end = config.data.tokenizer, None
    # A model of transformers has its own end of a text; a tokenizer may be gone.
    if tokenizer == "bytes" or (not hf and Path(tokenizer).exists()):
        end = load_tokenizer(tokenizer).end_of_document
    aside = to.with_name(to.name + PARTIAL)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        _write_weights(aside, folder, content, parts, max_file_bytes)
        if hf:
            # Configuration, tokenizer and code of the model that the run began with, not weights.
            for path in sorted(Path(str(config.model.path)).iterdir()):
                if path.is_file() and not path.name.endswith(_WEIGHTS):
                    shutil.copyfile(path, aside / path.name)
            made = json.loads((aside / "config.json").read_text())
            made.pop("torch_dtype", None)
            made["dtype"] = config.train.dtype
        else:
            form, length = form_of(config.model), config.data.sequence_length
            made = form.exported_config(config.model, config.train.dtype, length)
        (aside / "config.json").write_text(json.dumps(made, indent=2) + "\n")
        # The texts of a program's own data were tokenized by the program.
        own = content.data.fingerprint == CustomData.fingerprint
        why = "the run was trained on a program's own batches" if own else ""
        if missing := why or _write_tokenizer(aside, tokenizer, end):
            kept = f"the tokenizer in {to} is that of {config.model.path}" if hf else ""
            notes.append(f"{kept or 'no tokenizer was written'}: {missing}")
        sync(aside)
        aside.rename(to)
        sync(to.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return [*notes, f"{folder} (step {content.step}) is now in {to}: {len(parts)} tensors"]


def newest(run: Path) -> tuple[Path, Manifest, Config, list[str]]:
    """The newest complete checkpoint of a run's (or checkpoint's) folder, its configuration, and
    which were skipped.

    Raises:
        ConfigError: there is none, or what its model was made from is missing.
    """

    def read(folder: Path) -> Manifest:
        content = manifest.read(folder)
        manifest.check_files(folder, content, sorted(content.files))
        return content

    folder, content, notes = newest_whole(run, candidates(run), read)
    try:
        config = saved_config(content.config)
    except ConfigError as error:
        raise ConfigError(f"{folder / MANIFEST}: {error}") from None
    if config.model.family == "hf" and not Path(str(config.model.path)).is_dir():
        raise ConfigError(f"{folder} was trained from {config.model.path}, which does not exist")
    return folder, content, config, notes


def _tensors(config: Config, content: Manifest) -> Iterator[_ExportTensor]:
    """What is written: under the names in transformers, whose model a run holds as ``model``."""
    weights = {
        name.removeprefix("model."): record
        for name, record in content.tensors.items()
        if name.startswith("model.")
    }
    if config.model.family == "hf":
        for name, record in weights.items():
            own = name.removeprefix("model.")
            yield _ExportTensor(own, record.shape, record.dtype, f"model.{name}", lambda one: one)
        return
    shapes = {name: record.shape for name, record in weights.items()}
    made = form_of(config.model).exported_tensors(config.model, shapes)
    for name, source, shape, convert in made:
        dtype = config.train.dtype
        if source is not None and source.endswith("router.bias"):
            dtype = "float32"  # as in transformers: its steps are small
        yield _ExportTensor(name, shape, dtype, source and f"model.{source}", convert)


def _write_weights(
    to: Path, folder: Path, content: Manifest, parts: list[_ExportTensor], most: int
) -> None:
    files: list[list[_ExportTensor]] = [[]]
    size = 0
    for part in parts:
        if files[-1] and size + part.nbytes > most:
            files.append([])
            size = 0
        files[-1].append(part)
        size += part.nbytes
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        index = {
            "metadata": {"total_size": sum(part.nbytes for part in parts)},
            "weight_map": {p.name: n for n, own in zip(names, files, strict=True) for p in own},
        }
        (to / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for name, own in zip(names, files, strict=True):
        _write_file(to / name, folder, content, own)


def _write_file(path: Path, folder: Path, content: Manifest, parts: list[_ExportTensor]) -> None:
    reader = Reader(folder, content)
    held: dict[str, Tensor] = {}  # the last source: each expert is a part of one
    with path.open("wb") as file:
        file.write(header_of((part.name, part.dtype, part.shape) for part in parts)[0])
        for part in parts:
            value = torch.zeros(part.shape, dtype=getattr(torch, part.dtype))
            if part.source is not None:
                if part.source not in held:
                    held = {part.source: reader.whole(part.source)}
                value = part.convert(held[part.source]).to(value.dtype)
            assert value.shape == part.shape, "planned so"
            file.write(value.contiguous().view(-1).view(torch.uint8).numpy().data)


def _write_tokenizer(to: Path, tokenizer: str, end: int | None) -> str:
    """Write the tokenizer that made the run's ids, in the place of a model folder's own.

    Args:
        end: the id at which ``generate`` of transformers stops; ``None``: as the folder says.

    Returns:
        Why it was not written; empty if it was.
    """
    source = Path(tokenizer)
    if tokenizer == "bytes":
        files = {name: text.encode() for name, text in byte_tokenizer_files().items()}
    elif source.is_file():
        words = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
        files = {"tokenizer.json": source.read_bytes(), "tokenizer_config.json": words.encode()}
    elif source.is_dir():
        found = tokenizer_files(source)
        files = {str(path.relative_to(source)): path.read_bytes() for path in found}
    else:
        return f"the run's own, {tokenizer}, does not exist (data.tokenizer)"
    for path in tokenizer_files(to):
        path.unlink()
    for name, data in files.items():
        (to / name).parent.mkdir(exist_ok=True)
        (to / name).write_bytes(data)
    for path in (to / "config.json", to / "generation_config.json"):
        if end is not None and path.exists():
            content = {**json.loads(path.read_text()), "eos_token_id": end}
            path.write_text(json.dumps(content, indent=2) + "\n")
    return ""

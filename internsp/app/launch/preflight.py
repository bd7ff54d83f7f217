"""Checks before the ranks of a run start: its folder, packages, devices, model, a small text.

All mistakes are reported together. What only the run itself can show, a
full disk, a lack of memory, a mistake within a large text, it reports with the same messages.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from internsp.app.config import Config
from internsp.errors import MACHINE_ERRNOS, ConfigError, InternspError, MachineError

_SMALL_TEXT = 4 << 20  # bytes that are read and tokenized whole

# Errors that mean that a path given by the user is wrong.
_UNFIT = {
    errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG,
    errno.ELOOP, errno.EBUSY,
}  # fmt: skip


def check_before_start(config: Config, output: Path) -> None:
    """Check everything that ``internsp train`` will need on this machine. Writes nothing.

    Raises:
        ConfigError: mistakes in what the user gave (together with what the machine lacks).
        MachineError: the machine lacks something.
    """
    from internsp.app.session.optimizers import class_of

    found = [*_writers(config), *_output(config, output), *device_mistakes(config, {})]
    for check in (class_of, _model, _text):
        try:
            check(config)
        except InternspError as error:
            found.append(error)
    if not found:
        return
    kind = max(found, key=lambda error: error.exit_status == ConfigError.exit_status)
    raise type(kind)("\n  ".join(dict.fromkeys(str(error) for error in found)))


def check_joined(config: Config, output: Path, rank: int) -> None:
    """Like :func:`check_before_start`, in a rank of a launcher; does not read the text.

    Raises:
        ConfigError: the run's folder cannot be written (on rank 0, which writes it).
        MachineError: the machine lacks the device.
    """
    for error in device_mistakes(config, os.environ):
        raise error
    if rank:
        return
    for error in [*_writers(config), *_output(config, output)]:
        raise error


def _writers(config: Config) -> Iterator[InternspError]:
    if config.report.writers:
        from internsp.app.report.writers import missing_packages

        yield from missing_packages(config)


def as_machine_error(error: OSError, what: str) -> InternspError:
    """A failure of the file system as a one-line :class:`MachineError`, or as a wrong path."""
    text = f"{what}: {error.strerror or error}"
    return MachineError(text) if error.errno in MACHINE_ERRNOS else ConfigError(text)


@contextmanager
def errors_in_words() -> Iterator[None]:
    """A context that turns failures of files and memory in a rank into one-line errors."""
    try:
        yield
    except InternspError:
        raise
    except MemoryError as error:
        raise MachineError("out of memory") from error
    except OSError as error:
        if error.errno not in MACHINE_ERRNOS | _UNFIT or isinstance(error, ConnectionError):
            raise
        raise as_machine_error(error, error.filename or "a file of the run") from error
    except RuntimeError as error:
        # torch has no class for this on a CPU; on a GPU it is OutOfMemoryError.
        if not any(f"{words} memory" in str(error) for words in ("can't allocate", "out of")):
            raise
        raise MachineError(str(error).splitlines()[0]) from error


def _output(config: Config, output: Path) -> Iterator[InternspError]:
    """Check that the run's folder can be created and written."""
    path = Path(os.path.abspath(output))
    try:
        nearest = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
        _make_file(nearest)
        old = (path / "metrics.jsonl").exists()
        if old and config.checkpoint.resume in (None, "never"):
            _make_file(path.parent)  # the older run is moved aside
    except OSError as error:
        yield as_machine_error(error, f"--output: {output} cannot be written")


def _make_file(folder: Path) -> None:
    """Make a file without a name, so that nothing remains, however this ends."""
    tempfile.TemporaryFile(dir=folder).close()


def device_mistakes(config: Config, environment: Mapping[str, str]) -> Iterator[InternspError]:
    """Check that the requested device exists, and that there is one for each local process.

    Args:
        environment: that of a launcher's rank; empty for ranks that are started here.
    """
    wanted = config.parallel.device
    if wanted == "cpu":
        return
    there = _devices(wanted)
    if wanted != "auto" and not there:
        yield MachineError(
            f'parallel.device = "{wanted}": torch finds no {wanted.upper()} device on this '
            f'machine; use "cpu" or "auto", or install a driver and a torch with {wanted.upper()}'
        )
    local = int(environment.get("LOCAL_WORLD_SIZE") or config.launch.processes)
    if there and local > there:
        yield MachineError(
            f"launch.processes: {local} processes need a device each and this machine has "
            f'{there}; start {there}, or set parallel.device = "cpu"'
        )


def _devices(wanted: str) -> int:
    """Number of devices of the type ``wanted`` (``"auto"``: of any type), not counting the CPU."""
    from internsp.base import accelerator

    here = accelerator.default_device_type()
    return accelerator.device_count(here if wanted == "auto" else wanted) if here != "cpu" else 0


def _model(config: Config) -> None:
    """Build the model without values: kernels that are missing, patterns that match nothing."""
    from internsp.app.config.tiles import with_tile_count
    from internsp.app.models.factory import build_model, check_stored
    from internsp.app.session.optimizers import check_group_patterns
    from internsp.mesh import MeshShape
    from internsp.parallel.experts import take_experts
    from internsp.parallel.parallelize import examine
    from internsp.pipeline.pipeline import require_patterns_match

    shape = MeshShape(config.launch.processes, **config.degrees())
    weights = config.weight_parallel
    model: Any = build_model(config)  # a pipeline's parts are checked by their names
    check_stored(config, model)
    check_group_patterns(config, [name for name, _ in model.named_parameters()])
    take_experts(model, weights, shape.expert, 0)
    if shape.pipeline > 1:
        require_patterns_match(model, weights, shape)
    else:
        examine(model, weights, with_tile_count(config, shape.data), shape)


def _text(config: Config) -> None:
    """Read a small text as the ranks will; of a larger one the first document of each path."""
    from internsp.app.data.batches import DataSource, evaluations, tokenizer_of
    from internsp.app.data.documents import paths_of
    from internsp.app.data.tokens import encoded, state_of

    data, tokenizer = config.data, tokenizer_of(config)
    trained = data.mixture or (data,)
    parts = [part for part in (*trained, *data.evaluation) if part.source != "stdlib"]
    texts = [(part, path) for part in parts for path in paths_of(part)]
    # Nothing is written before a run: all tokens are in memory.
    if sum(state_of(*text)[1] for text in texts) > _SMALL_TEXT:
        for part, path in texts:
            next(iter(encoded(part, tokenizer, path)), None)
    elif all(part.source == "stdlib" for part in trained):
        evaluations(data, tokenizer, {})
    else:
        DataSource(data, global_batch=1, tokenizer=tokenizer, prepared=({}, []))

"""Running a training from Python: :func:`train`, as the command does it, and :class:`Trainer`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from internsp.app.config import Config, load_config
from internsp.app.launch.launch import start
from internsp.app.launch.preflight import check_before_start, check_joined, errors_in_words
from internsp.app.models.factory import device_type
from internsp.app.process.environment import launched
from internsp.app.process.stop import StopRequest
from internsp.app.report.metrics import StepMetrics
from internsp.app.session.own import Custom, Data, Loss
from internsp.app.session.session import Session
from internsp.app.train import run
from internsp.errors import ConfigError
from internsp.mesh import ParallelMesh
from internsp.optim import ZeroOptimizer
from internsp.pipeline import SchedulerHook
from internsp.wp.communicator import ISPCommunicator

Given = Config | str | Path | Mapping[str, Any]
"""A configuration, the path of its file, or its sections as dictionaries."""


class Callback:
    """Base class for callbacks. Each method does nothing here; override the ones you need.

    The methods are called on every rank, by the thread that trains, at the same point on all ranks,
    so a callback may communicate.
    """

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Called after a step, when its row is written. One more step follows a ``stop()``."""

    def on_evaluation(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Called when ``metrics.eval_loss`` is known, before :meth:`on_step` with the same row."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Called when the checkpoint in ``path`` is complete."""

    def on_end(self, trainer: Trainer) -> None:
        """Called at the end of the run, complete or stopped; rank 0 has written its report."""


class Trainer:
    """A run in this process: one of a launcher's processes (torchrun, ``srun``), or the only one.

    The configuration has the same effect as under ``internsp train``: mesh, checkpoints and
    resuming, metrics, report. Arguments given here replace what the configuration describes.

    Args:
        config: a configuration, the path of its file, or a dictionary of its sections.
        output: folder of the run (``None``: ``runs/<train.name>``).
        model: a model with values, the same on every rank; ``None``: the configured one. With a
            model given, only ``vocab_size`` of ``[model]`` is read. Without ``loss`` it is called
            as the zoo's models: ``model(input_ids, layout=..., labels=..., loss_chunk=...)``
            returns the sum of the token losses and their count. No pipeline.
        loss: ``loss(model, layout)`` returns the sum (not the mean) of this rank's token losses for
            ``layout.input_ids`` and ``layout.labels`` (-100: none), ``[rows, s]`` each.
        optimizer: makes a :class:`internsp.ZeroOptimizer` for a communicator; the learning rates of
            its groups follow ``optimizer.schedule``. The rest of ``[optimizer]`` is unused then.
        data: called with the mesh; returns an iterable of batches for this rank's
            ``mesh.data_rank``, one for each micro-batch: int64 ids
            ``[train.global_batch / (micro_batches * mesh.data), tokens]``, or a pair of ids and the
            document starts of each row. All ranks with the same data rank must get the same rows.
            The iterable (a generator, list, DataLoader) is iterated once; the run ends when some
            rank has no batch left. ``[data]`` is unused then, and there is no held-out loss.
        callbacks: called after steps, evaluations and checkpoints, and at the end.
        hooks: called at every forward, criterion and backward.

    Raises:
        ConfigError, MeshError: the configuration or a launcher's variables are wrong, or
            ``launch.processes`` is more than this one process.
    """

    def __init__(
        self,
        config: Given,
        *,
        output: str | Path | None = None,
        model: nn.Module | None = None,
        loss: Loss | None = None,
        optimizer: Callable[[ISPCommunicator], ZeroOptimizer] | None = None,
        data: Data | None = None,
        callbacks: Iterable[Callback] = (),
        hooks: Iterable[SchedulerHook] = (),
    ) -> None:
        rank, world = _launcher_rank()
        self.config = configuration(config, world or 1)
        if rank is None and not dist.is_initialized() and self.config.launch.processes > 1:
            raise ConfigError(
                f"launch.processes = {self.config.launch.processes}: a Trainer runs in this "
                "process alone; start the program with torchrun or srun, set it to 1, or call "
                "internsp.train"
            )
        self.output = _output(self.config, output)
        own = Custom(model, loss, optimizer, data)
        own.check(self.config)
        if rank is not None:
            check_joined(self.config, self.output, rank)
        self._callbacks = list(callbacks)
        self._stop = StopRequest()
        self._trained = False
        self.step = 0
        self._ours = not dist.is_initialized()
        if rank is None and self._ours:
            dist.init_process_group(  # of this process alone
                dist.get_default_backend_for_device(torch.device(device_type(self.config))),
                store=dist.HashStore(), rank=0, world_size=1,
                timeout=timedelta(seconds=self.config.parallel.timeout_seconds),
            )  # fmt: skip
        try:
            self._session = Session.create(self.config, hooks, own)
        except BaseException:
            self.close()
            raise

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh of the run."""
        return self._session.mesh

    @property
    def model(self) -> nn.Module:
        """The parallel model; in a pipeline, this rank's first chunk."""
        module: nn.Module = self._session.modules[0]
        return module

    @property
    def communicator(self) -> ISPCommunicator:
        """The communicator that ``parallelize`` returned for :attr:`model`."""
        return self._session.communicators[0]

    @property
    def optimizer(self) -> ZeroOptimizer:
        """The optimizer of :attr:`model`."""
        return self._session.optimizer

    def train(self) -> Path:
        """Train to the end. Collective; blocks. Can be called once.

        Returns:
            The folder of the run.

        Raises:
            ConfigError: at a second call, or after the process group was destroyed.
        """
        if self._trained or not dist.is_initialized():
            gone = "its process group is gone (close())"
            why = "a run is trained once" if self._trained else gone
            raise ConfigError(f"Trainer: {why}; make another Trainer to go on")
        self._trained = True
        with errors_in_words(), self._stop:
            run.run_session(self._session, self.output, self._stop, self._tell)
        return self.output

    def stop(self) -> None:
        """Stop the run on all ranks after the current step, with checkpoint and report.

        Ranks exchange the request with a step's loss; from a callback, with that of the next step.
        """
        self._stop.requested = True

    def _tell(self, event: str, *given: Any) -> None:
        """Call the method ``event`` of each callback, which is not told of ``resumed``."""
        if event == "resumed":
            (self.step,) = given
            return
        if event == "on_step":
            self.step = given[0].step
        for callback in self._callbacks:
            getattr(callback, event)(self, *given)

    def close(self) -> None:
        """Destroy the process group, if it was created here; the model cannot run afterwards."""
        if self._ours and dist.is_initialized():
            dist.destroy_process_group()
        self._ours = False

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def train(config: Given, *, output: str | Path | None = None) -> Path:
    """Train as ``internsp train`` does, and return the folder of the run. Blocks.

    If a launcher started this process, it is one of the ranks; otherwise ``launch.processes`` local
    ranks are started (in a script: below ``if __name__ == "__main__":``, as for multiprocessing).

    Args:
        config: a configuration, the path of its file, or a dictionary of its sections.
        output: folder of the run (``None``: ``runs/<train.name>``).

    Raises:
        InternspError: an error of the configuration, the machine, or the first rank that failed.
        KeyboardInterrupt, SystemExit: Ctrl-C or a signal stopped the run, after it saved.
    """
    rank, world = _launcher_rank()
    made = configuration(config, world)
    folder = _output(made, output)
    if rank is None:
        check_before_start(made, folder)
        status = start(run.train, made, folder)
    else:
        check_joined(made, folder, rank)
        with StopRequest() as stop:
            run.train(made, folder, stop=stop)
        status = 128 + stop.number if stop.number else 0
    if status:
        raise KeyboardInterrupt if status == 130 else SystemExit(status)
    return folder


def configuration(given: Given, world_size: int | None) -> Config:
    """``given`` as a checked configuration.

    Raises:
        ConfigError: lists all mistakes.
    """
    if not isinstance(given, Config):
        return load_config(given, world_size=world_size)
    mistakes = given.check(given.launch.processes if world_size is None else world_size)
    if mistakes:
        raise ConfigError("\n  ".join(["the configuration:", *mistakes]))
    return given


def _launcher_rank() -> tuple[int | None, int | None]:
    """Rank and world size from the launcher, if any; sets the variables that torch reads."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    around = launched(os.environ, joins=True)
    if around.problems:
        raise ConfigError("\n  ".join(str(problem) for problem in around.problems))
    os.environ.update(around.variables)
    return around.rank, around.world_size


def _output(config: Config, output: str | Path | None) -> Path:
    return Path("runs") / config.train.name if output is None else Path(output)

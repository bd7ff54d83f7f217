"""The composition root of one rank: mesh, model, communicator, optimizer and data of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from internsp.accelerator import device_clock
from internsp.config import Config
from internsp.data.batches import DataSource
from internsp.errors import ConfigError
from internsp.factory import build_to_train, first_values, move_buffers, to_parallelize
from internsp.mesh import ParallelMesh
from internsp.optim import LossScaler, ZeroOptimizer, step_together
from internsp.parallel import parallelize
from internsp.pipeline import Pipeline, SchedulerHook
from internsp.plan.tiles import resolved
from internsp.sp.dispatch import fixed_sizes
from internsp.trace import Trace
from internsp.train.inputs import open_source
from internsp.train.optimizers import make_optimizer, names_matched
from internsp.train.own import Own, OwnData
from internsp.train.rates import RateFactor
from internsp.wp.communicator import ISPCommunicator

_NOTHING = Own()


@dataclass
class Session:
    """Everything that one rank trains with.

    Attributes:
        modules: the model, or this rank's chunks of it, by ascending stage; a parameter has the
            same name in both.
        communicators, optimizers, schedules: one for each module.
        pipeline: runs the chunks; ``None`` where the model is whole.
        hooks: told of every forward, criterion and backward, with a pipeline or without.
        parameters: elements of the whole model.
        steps: of the run; with ``train.tokens`` about as many, see :func:`steps_of`.
        own: what the program gave in place of what is configured.
    """

    config: Config
    mesh: ParallelMesh
    modules: list[Any]
    communicators: list[ISPCommunicator]
    optimizers: list[ZeroOptimizer]
    schedules: list[torch.optim.lr_scheduler.LambdaLR]
    source: DataSource | OwnData
    trace: Trace
    pipeline: Pipeline | None
    hooks: list[SchedulerHook]
    parameters: int
    steps: int
    own: Own

    @property
    def optimizer(self) -> ZeroOptimizer:
        """The first module's: settings and loss scaler are the same for all."""
        return self.optimizers[0]

    @property
    def rate(self) -> float:
        """The learning rate of the next step, of what is in no group of its own."""
        schedule = self.schedules[0]
        return self.config.optimizer.lr * float(schedule.lr_lambdas[0](schedule.last_epoch))

    def step(self) -> float:
        """Optimizer and learning rate go one step further; returns the gradient norm."""
        step_together(self.optimizers, log=False)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.zero_grad()
            schedule.step()
        return self.optimizer.grad_norm

    @classmethod
    def create(
        cls, config: Config, hooks: Iterable[SchedulerHook] = (), own: Own = _NOTHING
    ) -> Session:
        """Build everything, but for what is the program's ``own``. Collective.

        Raises:
            ConfigError: when the text has ids that the model's vocabulary lacks; see ``factory``.
            InternspError: see :func:`internsp.parallelize` and :class:`ParallelMesh`.
        """
        parallel = config.parallel
        mesh = ParallelMesh.create(
            **config.degrees(),
            device_type=None if parallel.device == "auto" else parallel.device,
            timeout_seconds=parallel.timeout_seconds,
        )
        source: DataSource | OwnData
        if own.data is None:
            source = open_source(config, mesh)
        else:
            source = OwnData(own.data, config, mesh)
        steps = steps_of(config, source)
        model: Any = build_to_train(config) if own.model is None else own.model
        parameters = sum(p.numel() for p in model.parameters())
        names_matched(config, [name for name, _ in to_parallelize(model).named_parameters()])
        trace = Trace(clock=device_clock(mesh.device))
        everyone = list(hooks)
        modules: list[Any] = [model]
        pipeline = _pipeline(config, mesh, model, everyone, trace)
        if pipeline is not None:
            modules, communicators = list(pipeline.chunks), pipeline.communicators
        else:
            communicators = [
                parallelize(
                    to_parallelize(model),
                    mesh,
                    config.weight_parallel,
                    activation_checkpoint=resolved(config, mesh.data),
                    trace=trace,
                )
            ]
        if own.model is None:
            first_values(config, model, modules, communicators, mesh.device)
        else:
            move_buffers(model, mesh.device)
        scaler = _scaler(config)
        make = own.optimizer or (lambda each: make_optimizer(config, each, scaler))
        optimizers = [own.made(make(each)) for each in communicators]
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, RateFactor(config, steps))
            for optimizer in optimizers
        ]
        return cls(
            config, mesh, modules, communicators, optimizers, schedules, source, trace, pipeline,
            everyone if pipeline is None else pipeline.hooks, parameters, steps, own,
        )  # fmt: skip


def _pipeline(
    config: Config, mesh: ParallelMesh, model: Any, hooks: list[SchedulerHook], trace: Trace
) -> Pipeline | None:
    if mesh.pipeline == 1:
        return None
    train = config.train
    rows = train.global_batch // (train.micro_batches * mesh.data)
    lengths = fixed_sizes(config.data.sequence_length, mesh.sequence_axes)
    length = lengths[mesh.sequence_rank]
    return Pipeline.create(
        model,
        mesh,
        config.weight_parallel,
        schedule=config.pipeline.schedule,
        chunks=config.pipeline.chunks,
        micro_batches=train.micro_batches,
        activation_checkpoint=resolved(config, mesh.data),
        shape=(rows, length, config.model.hidden_size),
        hooks=hooks,
        trace=trace,
    )


def _scaler(config: Config) -> LossScaler | None:
    settings = config.optimizer
    if config.train.dtype == "float16" or config.weight_parallel.compute_dtype == "float16":
        return LossScaler(
            settings.loss_scale_init, growth_interval=settings.loss_scale_growth_interval
        )
    return None


def steps_of(config: Config, source: DataSource | OwnData) -> int:
    """Steps of a run. Of one that ends by ``train.tokens`` the schedule needs their number before
    it begins: as many as the tokens of the first sequences let expect."""
    train = config.train
    if not train.tokens:
        return train.steps
    one = source.tokens_of_a_sequence
    each = one * train.global_batch
    if train.batch_tokens and one:  # a step ends with the sequence that has the last of them
        each = math.ceil(train.batch_tokens / one) * one
    if not each:
        raise ConfigError(
            "train.tokens: in the first sequences of [data] no token is predicted, so that the run "
            "would not end: raise data.sequence_length"
        )
    return max(1, math.ceil(train.tokens / each))

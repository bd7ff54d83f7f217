"""Builds everything one rank trains with: mesh, model, communicator, optimizer and data."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from internsp.app.config import Config
from internsp.app.config.tiles import with_tile_count
from internsp.app.data.batches import DataSource, tokenizer_of
from internsp.app.data.tokenizer import Tokenizer
from internsp.app.data.tokens import Read, prepare
from internsp.app.models.factory import (
    build_for_training,
    fill_parameters,
    move_buffers,
    to_parallelize,
)
from internsp.app.plan.experts import chosen_experts
from internsp.app.process.stop import ended_at_once
from internsp.app.session.optimizers import check_group_patterns, make_optimizer, rate_factor
from internsp.app.session.own import Custom, CustomData
from internsp.base.accelerator import device_clock
from internsp.base.trace import Trace
from internsp.config.words import in_words
from internsp.errors import ConfigError
from internsp.failure.objects import Objects
from internsp.layers import balance_experts
from internsp.mesh import ParallelMesh
from internsp.optim import LossScaler, ZeroOptimizer, step_together
from internsp.parallel.parallelize import parallelize
from internsp.pipeline import Pipeline, SchedulerHook
from internsp.sp.dispatch import fixed_sizes
from internsp.wp.communicator import ISPCommunicator

# What may differ: places of files, whose content is compared, and what no launcher's rank reads.
_OWN = {
    "data.paths", "data.mixture", "data.evaluation", "data.cache_dir", "data.tokenizer",
    "model.path", "launch.processes",
}  # fmt: skip
_LOOK_SECONDS = 5.0  # between messages to the ranks that wait for tokens
_NOTHING = Custom()


def require_same(config: Config) -> None:
    """Check that all ranks have the same configuration: else they wait for each other without an
    end, or train with the mean of two batches, seeds or models. Collective.

    Raises:
        ConfigError: on every rank: it differs.
    """
    dumped = config.model_dump(mode="json").items()
    own = {f"{name}.{key}": value for name, keys in dumped for key, value in keys.items()}
    everyone = Objects().gather({key: value for key, value in own.items() if key not in _OWN})
    for rank, theirs in enumerate(everyone):
        if wrong := [key for key, value in everyone[0].items() if theirs[key] != value]:
            first, other = (in_words(values[wrong[0]]) for values in (everyone[0], theirs))
            raise ConfigError(
                f"{', '.join(wrong[:5])}: {first} on rank 0, {other} on rank {rank}: start every "
                "rank with the same configuration"
            )


def open_source(config: Config, mesh: ParallelMesh) -> DataSource:
    """Open the training data of a run. Collective.

    Raises:
        ConfigError: on every rank: see :class:`DataSource`; or the text has ids that the
            model's vocabulary lacks; or ranks have read other texts.
        InternspError: on every rank: a rank cannot see tokens that rank 0 made.
    """
    tokenizer = Objects().here(lambda: tokenizer_of(config))
    prepared = _prepare_tokens(config, tokenizer, mesh)
    made: list[DataSource] = []

    def create() -> tuple[str, list[str]]:
        own = DataSource(
            config.data, global_batch=config.train.global_batch, seed=config.train.seed,
            tokenizer=tokenizer, prepared=prepared,
        )  # fmt: skip
        made.append(own)
        evaluated = [s.digest() for rows in own.evaluations.values() for s in rows.documents.stores]
        return own.fingerprint, evaluated

    read = Objects().on_every(create)
    if wrong := [rank for rank, found in enumerate(read) if found != read[0]]:
        raise ConfigError(
            f"data: rank {wrong[0]} has read other text than rank 0 (of {len(read)} ranks, "
            f"{len(wrong)} have): give every rank the same files"
        )
    return made[0]


def _prepare_tokens(config: Config, tokenizer: Tokenizer, mesh: ParallelMesh) -> Any:
    """Make the missing tokens on rank 0. It sends the other ranks a message every few seconds, so
    that none waits in a collective for longer than its timeout, however large the data are."""
    pause, told = min(_LOOK_SECONDS, mesh.timeout_seconds / 4), time.monotonic()

    def telling(read: Read) -> Read:
        nonlocal told
        for piece in read:
            yield piece
            if time.monotonic() - told > pause:
                Objects().on_first(lambda: None)  # taken by the loop of the others, below
                told = time.monotonic()

    found = None
    while found is None:
        found = Objects().on_first(lambda: prepare(config.data, tokenizer, telling))
    return found


@dataclass
class Session:
    """Everything that one rank trains with.

    Attributes:
        modules: the model, or this rank's chunks of it, by ascending stage; a parameter has the
            same name in both.
        communicators, optimizers, schedules: one for each module.
        pipeline: runs the chunks; ``None`` without a pipeline.
        hooks: called at every forward, criterion and backward, with or without a pipeline.
        parameters: number of elements of the full model.
        steps: length of the run; with ``train.stop_after_tokens`` an estimate, :func:`steps_of`.
        custom: the program's own objects in place of configured ones.
    """

    config: Config
    mesh: ParallelMesh
    modules: list[Any]
    communicators: list[ISPCommunicator]
    optimizers: list[ZeroOptimizer]
    schedules: list[torch.optim.lr_scheduler.LambdaLR]
    source: DataSource | CustomData
    trace: Trace
    pipeline: Pipeline | None
    hooks: list[SchedulerHook]
    parameters: int
    steps: int
    custom: Custom

    @property
    def optimizer(self) -> ZeroOptimizer:
        """The optimizer of the first module: settings and loss scaler are the same for all."""
        return self.optimizers[0]

    @property
    def rate(self) -> float:
        """The next step's learning rate, of parameters in no group of ``optimizer.groups``."""
        schedule = self.schedules[0]
        return self.config.optimizer.lr * float(schedule.lr_lambdas[0](schedule.last_epoch))

    def leave_alone(self, alone: bool) -> None:
        """See :attr:`internsp.wp.contents.Contents.left_alone`."""
        for communicator in self.communicators:
            communicator.events.contents.left_alone = alone

    def step(self) -> None:
        """Run one step of optimizers, experts' balance and learning rate schedules."""
        step_together(self.optimizers, log=False)
        balance_experts(*self.modules)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.zero_grad()
            schedule.step()

    @classmethod
    def create(
        cls, config: Config, hooks: Iterable[SchedulerHook] = (), custom: Custom = _NOTHING
    ) -> Session:
        """Build everything except the objects in ``custom``. Collective.

        Raises:
            ConfigError: the text has ids that the model's vocabulary lacks; see ``factory``.
            InternspError: see :func:`internsp.parallelize` and :class:`ParallelMesh`.
        """
        if config.parallel.expert == "auto":
            started = dist.is_initialized()
            ranks = dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", "1"))
            config = chosen_experts(config, ranks)
        parallel = config.parallel
        with ended_at_once():
            mesh = ParallelMesh.create(
                **config.degrees(),
                device_type=None if parallel.device == "auto" else parallel.device,
                timeout_seconds=parallel.timeout_seconds,
            )
        require_same(config)
        source: DataSource | CustomData
        if custom.data is None:
            source = open_source(config, mesh)
        else:
            vocabulary = config.model.vocab_size if custom.model is None else None
            source = CustomData(custom.data, config, mesh, vocabulary)
        steps = steps_of(config, source)
        model: Any = build_for_training(config) if custom.model is None else custom.model
        parameters = sum(p.numel() for p in model.parameters())
        check_group_patterns(config, [name for name, _ in to_parallelize(model).named_parameters()])
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
                    sequence=config.sequence.of_model(),
                    activation_checkpoint=with_tile_count(config, mesh.data),
                    trace=trace,
                )
            ]
        if custom.model is None:
            fill_parameters(config, model, modules, communicators, mesh.device)
        else:
            move_buffers(model, mesh.device)
        halves = "float16" in (config.train.dtype, config.weight_parallel.compute_dtype)
        scaler = LossScaler(config.optimizer.loss_scale_init) if halves else None
        make = custom.optimizer or (lambda each: make_optimizer(config, each, scaler))
        optimizers = [custom.checked_optimizer(make(each)) for each in communicators]
        for optimizer in optimizers:
            optimizer.train()
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor(config, steps))
            for optimizer in optimizers
        ]
        return cls(
            config, mesh, modules, communicators, optimizers, schedules, source, trace, pipeline,
            everyone if pipeline is None else pipeline.hooks, parameters, steps, custom,
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
        sequence=config.sequence.of_model(),
        schedule=config.pipeline.schedule,
        chunks=config.pipeline.chunks,
        micro_batches=train.micro_batches,
        activation_checkpoint=with_tile_count(config, mesh.data),
        shape=(rows, length, config.model.hidden_size),
        router_scale=lambda: 1.0,  # a step sets it with the criterion
        hooks=hooks,
        trace=trace,
    )


def steps_of(config: Config, source: DataSource | CustomData) -> int:
    """Number of steps of a run.

    With ``train.stop_after_tokens`` it is estimated from the tokens of the first sequences, since
    the learning rate schedule needs it before the run begins.
    """
    train = config.train
    if not train.stop_after_tokens:
        return train.steps
    one = source.tokens_of_a_sequence
    each = one * train.global_batch
    if train.batch_tokens and one:  # a step ends with the sequence in which it reaches this number
        each = math.ceil(train.batch_tokens / one) * one
    if not each:
        raise ConfigError(
            "train.stop_after_tokens: in the first sequences of [data] no token is predicted, so "
            "that the run would not end: raise data.sequence_length"
        )
    return max(1, math.ceil(train.stop_after_tokens / each))

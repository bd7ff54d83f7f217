"""``transformers.Trainer`` for a parallel model (extra ``[hf]``; the Trainer needs accelerate).

It differs only in what internsp owns: the model stays as ``parallelize`` left it (no DDP, no move,
no cast), the optimizer is a :class:`internsp.ZeroOptimizer` with the class and parameter groups of
the Trainer's arguments, and all ranks write a checkpoint.
"""

from __future__ import annotations

import logging
import random
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from internsp.app.checkpoint.checkpoint import random_states, set_random, state_key
from internsp.app.checkpoint.state_folder import load_state, save_state
from internsp.clients.data_ranks import DataRanks
from internsp.errors import ConfigError
from internsp.optim import ZeroOptimizer
from internsp.sp.hf.examine import find_pretrained_model
from internsp.wp.communicator import ISPCommunicator

_LOG = logging.getLogger("internsp.clients")
_STATE = "optimizer"
_PYTHON, _NUMPY = "random.python", "random.numpy"


class Trainer(transformers.Trainer):
    """The Trainer for a model that :func:`internsp.parallelize` has sharded. All ranks make one.

    A class that itself derives from the Trainer (trl's, your own) is made parallel by
    ``class Parallel(internsp.clients.trainer.Trainer, Theirs): ...``.

    Each data rank has its own batches, as under DDP; the ranks of a sequence group share them. A
    step's gradient is the mean over data ranks of what ``compute_loss`` returns. With
    ``average_tokens_across_devices`` (the Trainer's default) this is the mean over all valid tokens
    of all ranks and micro-batches, as on one process. A step with gradients that are not finite is
    skipped (:class:`internsp.ZeroOptimizer`).

    A checkpoint has the full model for ``from_pretrained`` (of a PEFT model its adapter), and in
    the folder ``optimizer`` the rest of the training state: optimizer, schedule and random states,
    in the format of ``internsp train`` (``docs/howto/save_and_resume.md``). Training can resume
    from it on any mesh. Nothing in it is a pickle.

    Args:
        model: as :func:`internsp.parallelize` left it.
        args: as for the Trainer. ``bf16`` is autocast; ``compute_dtype = "bfloat16"`` in
            :class:`internsp.WeightParallelConfig` also halves the traffic.
        communicator: what ``parallelize`` returned.
        options: all other arguments of the Trainer.

    Raises:
        ConfigError: arguments that are not supported here; all of them are listed.
    """

    optimizer: Any  # a ZeroOptimizer; during training in accelerate's wrapper

    def __init__(
        self,
        model: nn.Module,
        args: transformers.TrainingArguments,
        *,
        communicator: ISPCommunicator,
        **options: Any,
    ) -> None:
        _require_supported(model, args, communicator, options)
        self._communicator = communicator
        self._data_ranks: DataRanks | None = None
        super().__init__(model=model, args=args, **options)

    # The model stays as it is: nothing moves, casts or wraps it.

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer, but without accelerate's changes to the model and its gradients."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = self._keep_model
        self.accelerator.backward = self._backward
        mesh, seed = self._communicator.mesh, self.args.data_seed
        if mesh.sequence > 1:
            seed = self.args.seed if seed is None else seed
            self._data_ranks = DataRanks(self.accelerator, mesh, seed)

    def _keep_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        if model not in self.accelerator._models:  # evaluation looks for prepared models here
            self.accelerator._models.append(model)
        return model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        pass

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager[Any]:
        """Accelerate's autocast, which it would otherwise have put around the model's forward."""
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    # Batches: the ranks of a sequence group share one.

    def get_tp_size(self) -> int:
        """Number of ranks with the same batch, by the Trainer's name for it."""
        return self._communicator.mesh.sequence

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Operations of this rank: the Trainer sums over all ranks."""
        return super().floating_point_ops(inputs) / self.get_tp_size()

    def _get_num_items_in_batch(self, *args: Any, **options: Any) -> Tensor | int | None:
        # The Trainer divides by get_tp_size() what it counted on every rank.
        count = super()._get_num_items_in_batch(*args, **options)
        return count * self.get_tp_size() if isinstance(count, Tensor) else count

    def _get_dataloader(
        self, dataset: Any, *args: Any, is_training: bool = False, **options: Any
    ) -> Any:
        if self._data_ranks is not None and not is_training:
            self._data_ranks.require_countable(dataset)
        return super()._get_dataloader(dataset, *args, is_training=is_training, **options)

    # One step.

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make a :class:`internsp.ZeroOptimizer` of the Trainer's class, settings and groups."""
        if self.optimizer is None:
            plain = super().create_optimizer(model)  # has no state yet
            _, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, self.model
            )
            groups = [group for group in plain.param_groups if group["params"]]
            self.optimizer = ZeroOptimizer(
                self._communicator, type(plain), param_groups=groups, **settings
            )
        made: torch.optim.Optimizer = self.optimizer
        return made

    @property
    def _zero(self) -> ZeroOptimizer:
        zero: ZeroOptimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return zero

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        """As the Trainer; replicas all-reduce gradients only after a step's last micro-batch."""
        last = self.accelerator.sync_gradients
        with nullcontext() if last else self._communicator.no_replica_sync():
            loss: Tensor = super().training_step(*args, **options)
        return loss

    def _backward(self, loss: Tensor, **options: Any) -> None:
        # The Trainer expects DDP's mean over ranks, and multiplies its loss to compensate for it;
        # here gradients are sums (design.md 6). The logged loss is unchanged. Each rank of a
        # sequence group has the loss, and its own part of the gradient.
        (loss / self._communicator.mesh.data).backward(**options)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        return None  # clipped in the optimizer's step: before it, no rank has the full gradient

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        # Called in each step, with clipping or without, right before the optimizer's step.
        self._zero.max_grad_norm = self.args.max_grad_norm or None

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, *args: Any, **options: Any
    ) -> None:
        norm = self._zero.grad_norm if self.control.should_log else None  # to read it is to wait
        super()._maybe_log_save_evaluate(tr_loss, norm, *args, **options)

    # Checkpoints.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the full model for ``from_pretrained``, on the first rank. Collective."""
        adapter = hasattr(self.model, "peft_config")  # saved alone: frozen weights stay sharded
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapter
        )
        self._save(output_dir, get_model_state_dict(self.model, options=options))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self._zero.local_state_dict()
        tensors, values = _flat(state)
        values["param_groups"] = [
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for group in state["param_groups"]
        ]
        values["scheduler"] = self.lr_scheduler.state_dict()
        states, more = self._random_states()
        save_state(Path(output_dir) / _STATE, tensors | states, values | more)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint) / _STATE
        if not folder.is_dir():
            _LOG.warning("%s is not there: the optimizer starts anew", folder)
            return
        state = self._zero.local_state_dict()
        tensors, own = _flat(state)
        values = load_state(folder, tensors)
        for name, entry in state["state"].items():
            for kind in entry:
                key = state_key(name, kind)
                entry[kind] = tensors.get(key, values.get(key, own.get(key)))
        groups = values["param_groups"]
        if len(groups) == len(state["param_groups"]):
            for group, settings in zip(groups, state["param_groups"], strict=True):
                # JSON has no tuples.
                pairs = (k for k, v in settings.items() if isinstance(v, tuple) and k in group)
                group.update({key: tuple(group[key]) for key in pairs})
        self._zero.load_local_state_dict({**state, "param_groups": groups})
        self.lr_scheduler.load_state_dict(values["scheduler"])

    def _save_rng_state(self, output_dir: str) -> None:
        pass  # saved with the optimizer's state

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / _STATE).is_dir():
            return
        states, own = self._random_states()
        values = load_state(Path(checkpoint) / _STATE, states)
        missing = own.keys() - values.keys()
        if missing:
            rank = self._communicator.mesh.rank
            _LOG.warning("%s was saved by fewer ranks: none was rank %s", checkpoint, rank)
            return
        for name, value in states.items():
            if name.startswith(_PYTHON):
                version, gauss = values[name]
                random.setstate((version, tuple(value.tolist()), gauss))
            elif name.startswith(_NUMPY):
                kind, *rest = values[name]
                np.random.set_state((kind, value.numpy().astype(np.uint32), *rest))  # noqa: NPY002
            else:
                set_random(name, value)

    def _random_states(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """This rank's states of all generators that the Trainer saves: tensors, other values."""
        mesh = self._communicator.mesh
        version, numbers, gauss = random.getstate()
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the Trainer's
        python, numpy = f"{_PYTHON}, rank {mesh.rank}", f"{_NUMPY}, rank {mesh.rank}"
        tensors = random_states(mesh)
        states = {f"random.{name}": value for name, value in tensors.items()}
        states[python] = torch.tensor(numbers, dtype=torch.int64)
        states[numpy] = torch.from_numpy(np.asarray(keys).astype(np.int64))
        return states, {python: [version, gauss], numpy: [kind, *rest]}


def _flat(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimizer state by parameter, as (tensors, other values) by their names in a checkpoint."""
    entries = {
        state_key(name, kind): value
        for name, entry in state["state"].items()
        for kind, value in entry.items()
    }
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in entries.items() if name not in tensors}


def _require_supported(
    model: nn.Module,
    args: transformers.TrainingArguments,
    communicator: ISPCommunicator,
    options: dict[str, Any],
) -> None:
    """Check that the Trainer's arguments are supported.

    Raises:
        ConfigError: see :class:`Trainer`.
    """
    mesh = communicator.mesh
    before = "do it to the model before parallelize()"
    optimizer = (options.get("optimizers") or (None, None))[0]
    wrong = {
        f"the launcher gives {args.world_size} processes, the mesh has {mesh.world_size} ranks: "
        "start with torchrun, so that each rank has batches of its own":
            args.world_size != mesh.world_size,
        f"args.device is {args.device}, the mesh computes on {mesh.device}":
            args.device.type != mesh.device.type,
        f"the mesh has pipeline = {mesh.pipeline}: make it with pipeline = 1": mesh.pipeline > 1,
        f"the mesh has tensor = {mesh.tensor}: make it with tensor = 1": mesh.tensor > 1,
        "reduction = 'mean' in WeightParallelConfig: the loss is divided here, leave 'sum'":
            communicator.mean,
        "fp16: use bf16, or compute_dtype = 'bfloat16'": args.fp16,
        "fp16_full_eval, bf16_full_eval: a parallel model is not cast": (
            args.fp16_full_eval or args.bf16_full_eval
        ),
        "fsdp, deepspeed, parallelism_config: internsp does what they do": (
            args.fsdp or args.deepspeed or args.parallelism_config
        ),
        "torch_compile: set compile = True in WeightParallelConfig": args.torch_compile,
        f"use_liger_kernel: {before}": args.use_liger_kernel,
        "auto_find_batch_size: a rank out of memory ends its group": args.auto_find_batch_size,
        "save_on_each_node: give all machines one output_dir": args.save_on_each_node,
        "model_init: give the model that parallelize() has cut": options.get("model_init"),
        "optimizers: only a ZeroOptimizer of this communicator; or set optim, or "
        "optimizer_cls_and_kwargs": (
            optimizer is not None
            and getattr(optimizer, "_communicator", None) is not communicator
        ),
    }  # fmt: skip
    if mesh.sequence > 1:
        wrong |= _sequence_parallel_limits(model, args, options)
    lines = [line for line, applies in wrong.items() if applies]
    if lines:
        raise ConfigError(
            f"internsp.clients.trainer.Trainer on rank {mesh.rank}: " + "; ".join(lines)
        )


def _sequence_parallel_limits(
    model: nn.Module, args: transformers.TrainingArguments, options: dict[str, Any]
) -> dict[str, Any]:
    """Arguments that a sequence degree above 1 excludes, and whether each is used."""
    config, logits = args.accelerator_config, "in training a rank has the logits of its positions"
    return {
        "sequence > 1: the Trainer's batches are cut by models of transformers only":
            find_pretrained_model(model) is None,
        f"label_smoothing_factor: {logits}": args.label_smoothing_factor,
        f"compute_loss_func: {logits}; override compute_loss":
            options.get("compute_loss_func"),
        "train_sampling_strategy = 'batch_rebalance': it gives each process rows of its own":
            args.train_sampling_strategy == "batch_rebalance",
        "eval_use_gather_object: it would count a sequence group's rows once a rank":
            args.eval_use_gather_object,
        "dispatch_batches: its messages are between processes": config.dispatch_batches,
        "use_seedable_sampler = False: ranks would shuffle each in its own way":
            not config.use_seedable_sampler,
    }  # fmt: skip

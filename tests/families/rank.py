"""A rank's part: compares one family on a mesh with the same model on one process."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from internsp import (
    ActivationCheckpointConfig,
    ParallelMesh,
    WeightParallelConfig,
    parallelize,
)
from internsp.errors import InternspError
from tests.families.configs import BASE, FAMILIES, LENGTH, SETTINGS, VOCABULARY
from tests.families.options import Kind, Setting
from tests.support.compare import gap, gaps, gradients, parameters

transformers.logging.set_verbosity_error()

ROWS = 2  # sequences per rank, unless ranks share them
STEPS = 2
KINDS = ("loss", "gradient", "parameter", "logits")
# Weights of each kind: sharded, sharded and coalesced, and (vectors) replicated.
WEIGHTS = {"min_shard_elements": 20, "coalesce_bytes": 2048, "reduction": "mean"}
CHECKPOINTS: dict[str, ActivationCheckpointConfig | None] = {
    "full": ActivationCheckpointConfig(mode="full"),
    "half": ActivationCheckpointConfig(mode="full", fraction=0.5),
    "reentrant": ActivationCheckpointConfig(mode="full", reentrant=True),
}

Differences = dict[str, tuple[float, str]]
"""The largest difference of each kind, and where it occurs."""


def build(family: str, tied: bool) -> nn.Module:
    """A model of ``family`` with random weights in fp64, the same on every rank; no dropout."""
    kind = CONFIG_MAPPING[family]
    known = {*getattr(kind, "__dataclass_fields__", ()), *kind.attribute_map}
    sizes = {name: value for name, value in BASE.items() if name in known}
    options = {**sizes, **FAMILIES[family], "tie_word_embeddings": tied}
    config = kind(**{name: value for name, value in options.items() if value is not None})
    for name, value in vars(config).items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped_mm has no fp64 on CPU
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # many are initialized to zero or one, which would hide mistakes
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=0.02)
    return model.train()


def is_tied(model: nn.Module) -> bool:
    """Whether the head's weight is the embedding's."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    return head is not None and getattr(head, "weight", None) is embedding.weight


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels ``[rows, LENGTH]``, the same on every rank.

    Every row has eight labels that count: the divisors are powers of two, so that an fp32 loss
    scales its gradients with the same bits on one process and on several.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, 3::2] = -100
    labels[:, :1] = 7  # token 7 is never a label
    labels[:, 1] = ids[:, 1]
    return ids, labels


class Widened(TorchFunctionMode):
    """Computes in fp64 what a model explicitly computes in fp32: only rounding changes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the class."""
        if func in (Tensor.backward, torch.autograd.backward):
            # The recompute must run in this mode, which Tensor.backward would disable; the engine
            # itself does not (private, called as torch.autograd.graph does). A reentrant checkpoint
            # calls torch.autograd.backward, inside which another may run.
            engine = torch.autograd.Variable._execution_engine
            given = (kwargs or {}).get("grad_tensors")
            outputs = args[:1] if given is None else tuple(args[0])
            ones = tuple(torch.ones_like(x) for x in outputs) if given is None else tuple(given)
            with self:
                return engine.run_backward(
                    outputs, ones, False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        args, kwargs = tree_map(_wide, (args, kwargs or {}))
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@dataclass(frozen=True)
class Reference:
    """The results of one process."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]
    parameters: dict[str, Tensor]
    logits: Tensor


class Comparison:
    """The worker of ``tools.bench.ranks``: one of several processes."""

    def __init__(self) -> None:
        self._meshes: dict[tuple[int, int, int], ParallelMesh] = {}
        torch.use_deterministic_algorithms(True)  # which also fills torch.empty with NaN

    def kind(self, family: str) -> Kind:
        """The supported features of ``family``."""
        models = [build(family, tied) for tied in (False, True)]
        ties = tuple(sorted({is_tied(model) for model in models}))
        return Kind(ties, bool(models[0].supports_gradient_checkpointing))

    def compare(self, family: str, setting: Setting, widened: bool) -> Differences:
        """The largest differences of this rank's part, over the largest element.

        Args:
            widened: compute in fp64 what the model itself would compute in fp32.

        Returns:
            For ``loss``, ``gradient``, ``parameter`` (after steps of SGD) and ``logits`` (of an
            evaluation) the difference, and where it occurs.
        """
        try:
            with Widened() if widened else nullcontext():
                return self._compare(family, setting, widened)
        except InternspError as error:  # reported in one line
            raise type(error)(" ".join(str(error).split())) from error

    def _compare(self, family: str, setting: Setting, widened: bool) -> Differences:
        ours = build(family, setting.tied)
        mesh = self._parallel(ours, family, setting)
        wanted = self._reference(family, setting.tied, ROWS * mesh.data, widened)
        mine = slice(ROWS * mesh.data_rank, ROWS * (mesh.data_rank + 1))
        found = dict.fromkeys(KINDS, (0.0, ""))

        def note(kind: str, where: str, apart: float) -> None:
            found[kind] = max(found[kind], (apart, where))

        for step in range(STEPS):
            ids, labels = batch(ROWS * mesh.data, step)
            loss = ours(input_ids=ids[mine], labels=labels[mine], use_cache=False).loss
            loss.backward()
            note("loss", f"step {step}", gap(_mean(loss, mesh), wanted.losses[step]))
            for name, apart in gaps(gradients(ours), wanted.gradients[step]).items():
                note("gradient", f"{name}, step {step}", apart)
            _step(ours)
        for name, apart in gaps(parameters(ours), wanted.parameters).items():
            note("parameter", name, apart)
        ids, _ = batch(ROWS * mesh.data, STEPS)
        with torch.no_grad():
            logits = ours.eval()(input_ids=ids[mine], use_cache=False).logits
        note("logits", "", gap(logits, wanted.logits[mine]))
        return found

    @lru_cache(4)  # noqa: B019 - of one family; the process ends with this object
    def _reference(self, family: str, tied: bool, rows: int, widened: bool) -> Reference:
        model = build(family, tied)
        losses, found = [], []
        for step in range(STEPS):
            ids, labels = batch(rows, step)
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
            found.append(gradients(model))
            _step(model)
        ids, _ = batch(rows, STEPS)
        with torch.no_grad():
            logits = model.eval()(input_ids=ids, use_cache=False).logits
        return Reference(losses, found, parameters(model), logits)

    def _parallel(self, model: nn.Module, family: str, setting: Setting) -> ParallelMesh:
        degrees = (setting.weight, setting.sequence, setting.ring)
        if degrees not in self._meshes:
            self._meshes[degrees] = ParallelMesh.create(
                setting.weight, setting.sequence, ring=setting.ring, device_type="cpu"
            )
        if setting.checkpointing.startswith("own"):
            reentrant = setting.checkpointing.endswith("reentrant")
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        communicator = parallelize(
            model,
            self._meshes[degrees],
            WeightParallelConfig(**{**WEIGHTS, **SETTINGS.get(family, {})}),
            activation_checkpoint=CHECKPOINTS.get(setting.checkpointing),
        )
        communicator.state.pool.poison = True  # a slot is filled with NaN when it is reused
        return communicator.mesh


def _step(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def _mean(loss: Tensor, mesh: ParallelMesh) -> Tensor:
    """The sum of all ranks' losses."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / mesh.world_size

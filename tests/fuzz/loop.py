"""One training loop for both sides: one process with all ranks' data, and a rank with its own.

:class:`Side` runs a case's program on a model and calls ``note`` with every number that must be
equal on both sides: losses, gradients, norms, parameters.
"""

from __future__ import annotations

import contextlib
import copy
import random
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

import internsp
from internsp.wp.communicator import ISPCommunicator
from tests.fuzz.draw import Case
from tests.fuzz.shapes import Drawn, PlannedError, loss_of, whole

Note = Callable[[str, dict[str, Any]], None]

class Counting(torch.optim.Optimizer):
    """Keeps its state in its groups: the steps, as apex's ``FusedAdam``, and a sum of weights, as
    optimizers without a schedule do."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "step": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            group["weight_sum"] += group["step"] ** 0.5
            share = group["step"] ** 0.5 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * share)


CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "sgd_foreach": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5, "foreach": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.02, "eps": 1e-4}),
    "adamw_foreach": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-4, "foreach": True}),
    "adamw_loop": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-4, "foreach": False}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-4, "fused": True}),
    "counting": (Counting, {"lr": 0.05}),
    "zero_counting": (Counting, {"lr": 0.05}),
    "zero_adamw": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-4, "weight_decay": 0.1}),
    "zero_sgd": (torch.optim.SGD, {"lr": 0.05}),
    "zero_momentum": (torch.optim.SGD, {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.01}),
    "zero_groups": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-4}),
    "zero_rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "eps": 1e-4}),
}
MAX_NORM = 0.7


class Side:
    """A model in training.

    Args:
        ranks: those whose data this process computes with.
        communicator: of the model, if it is sharded.
        wanted: of one process, see :class:`tests.fuzz.compare.Comparison`.
    """

    def __init__(
        self,
        case: Case,
        model: Drawn,
        ranks: list[int],
        communicator: ISPCommunicator | None,
        note: Note,
    ) -> None:
        self.case, self.model, self.ranks = case, model, ranks
        self.communicator, self.note = communicator, note
        self.zero = case.optimizer.startswith("zero")
        self.named = dict(model.named_parameters())
        self.trainable = [p for p in self.named.values() if p.requires_grad]
        self.optimizer = self._make_optimizer()
        self.kept: tuple[dict[str, Any], dict[str, Any]] | None = None
        self.passes = 0  # forwards so far: each has different data
        self.buffers: dict[int, dict[str, Tensor]] = {r: self._buffers() for r in ranks}

    def run(self) -> None:
        """Run the program, then note the final parameters."""
        for number, op in enumerate(self.case.program):
            self.where = f"op {number} {op[0]}"
            getattr(self, f"_do_{op[0]}")(*op[1:])
        self.where = "at the end"
        self._do_parameters()

    # the model

    def _buffers(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.named_buffers()}

    def _batch(self, rank: int) -> tuple[Tensor, Tensor, int]:
        case = self.case
        rng = random.Random(f"{case.seed}:{self.passes}:{rank}")
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        shape = (2, case.rows, case.length)
        ids, labels = torch.randint(0, case.vocabulary, shape, generator=generator)
        alone = random.Random(f"{case.seed}:{self.passes}")
        unused = alone.random() < 0.2  # True: unused on all ranks
        return ids, labels, 0 if unused else rng.randrange(64)

    def forward(self, use: int | None = None) -> list[tuple[Tensor, list[Tensor]]]:
        """For each rank its loss and the hidden states after each block; new data in each call."""
        self.passes += 1
        found = []
        for rank in self.ranks:
            for name, buffer in self.model.named_buffers():
                buffer.data.copy_(self.buffers[rank][name])
            ids, labels, drawn = self._batch(rank)
            output = self.model(ids, labels, drawn if use is None else use)
            loss = loss_of(output, labels, self.case.output)
            found.append((loss, list(self.model.middle)))
            self.buffers[rank] = self._buffers()
        self._note_by_rank("loss", [loss for loss, _ in found])
        return found

    def total(self, losses: list[Tensor]) -> Tensor:
        """The tensor to call backward on: on one process the sum, or mean, over the ranks."""
        total = torch.stack(losses).sum()
        alone = self.communicator is None
        return total / self.case.world if alone and self._mean else total

    @property
    def _mean(self) -> bool:
        return self.case.options.get("reduction") == "mean"

    def _pass(self, kind: str) -> None:
        if kind == "throw_first":
            self.forward()
        if kind == "assigned_before":
            self._do_write("load_assigned", -1)
        if kind in ("sum_of_two", "both", "reversed"):
            self._two_passes(kind)
            return
        found = self.forward()
        loss = self.total([loss for loss, _ in found])
        index = len(found[0][1]) // 2
        middle = self.total([hidden[index].square().mean() for _, hidden in found])
        if kind == "evaluate_between":
            self._do_evaluate("no_grad")
        if kind == "gradient_of_hidden":
            self._gradient_of_hidden(loss, [hidden[index] for _, hidden in found])
        if kind == "retain":
            (loss * 0.5).backward(retain_graph=True)
        if kind == "penalty" and all(hidden[index].requires_grad for _, hidden in found):
            of = [hidden[index] for _, hidden in found]
            gradients = torch.autograd.grad(loss, of, create_graph=True)
            loss = loss + self.total([g.square().sum() for g in gradients])
        if kind == "with_middle":
            loss = loss + middle
        if kind == "weights_in_loss":
            chosen = self.trainable[:: max(len(self.trainable) // 3, 1)]
            of = [p for p in chosen if p.requires_grad]
            loss = loss + 0.01 * _squares(of)  # equal on all ranks, and so is its gradient
        if kind == "middle":
            loss = middle
        if kind == "some_inputs":
            chosen = self.trainable[:: max(len(self.trainable) // 3, 1)]
            chosen = [p for p in chosen if p.requires_grad]
            loss.backward(inputs=chosen)
        elif loss.requires_grad:
            loss.backward()

    def _two_passes(self, kind: str) -> None:
        """Two forwards before the first backward."""
        pair = [self.total([loss for loss, _ in self.forward()]) for _ in range(2)]
        if kind == "sum_of_two":
            (pair[0] + pair[1]).backward()
        for loss in () if kind == "sum_of_two" else pair if kind == "both" else pair[::-1]:
            loss.backward()

    def _gradient_of_hidden(self, loss: Tensor, hidden: list[Tensor]) -> None:
        if not all(h.requires_grad for h in hidden):
            return
        gradients = torch.autograd.grad(loss, hidden, retain_graph=True)
        scale = self.case.world if self.communicator is None and self._mean else 1
        self._note_by_rank("gradient of hidden states", [g * scale for g in gradients])

    def _note_by_rank(self, what: str, values: list[Tensor]) -> None:
        by_rank = {f"rank {r}": v.detach() for r, v in zip(self.ranks, values, strict=True)}
        self.note(f"{self.where}: {what}", by_rank)

    @contextlib.contextmanager
    def _quiet(self, sync: str, last: bool) -> Iterator[None]:
        kinds = {"no_sync": ["no_sync"], "no_replica_sync": ["no_replica_sync"],
                 "mixed": [("no_sync", "no_replica_sync")[self.passes % 2]],
                 "nested": ["no_replica_sync", "no_sync"]}.get(sync, [])  # fmt: skip
        with ExitStack() as stack:
            for kind in kinds:
                if self.communicator is not None and not last:
                    context: AbstractContextManager[None] = getattr(self.communicator, kind)()
                    stack.enter_context(context)
            if sync == "unchanged" and self.communicator is not None:
                stack.enter_context(self.communicator.unchanged())
            yield

    # operations

    def _do_accumulate(self, sync: str, passes: tuple[str, ...]) -> None:
        for i, kind in enumerate(passes):
            last = i == len(passes) - 1
            with self._quiet(sync, last):
                self._pass(kind)

    def _do_thrown(self, sync: str, passes: tuple[str, ...], who: str) -> None:
        for kind in passes:
            with self._quiet(sync, last=False):
                self._pass(kind)
        self._do_zero(who)

    def _do_look(self) -> None:
        if self.zero and self.communicator is not None:
            assert isinstance(self.optimizer, internsp.ZeroOptimizer)
            found: dict[str, Any] = dict(self.optimizer.gather_gradients())
        else:
            found = {n: p.grad for n, p in self.named.items() if p.grad is not None}
        frozen = {n for n, p in self.named.items() if not p.requires_grad}
        found = {n: g for n, g in found.items() if not (n in frozen and self.zero)}
        self.note(f"{self.where}: gradients", found)

    def _do_step(self) -> None:
        if self.zero and self.communicator is not None:
            self.optimizer.step()
            norm = self.optimizer.grad_norm
        else:
            norm = self._clip()
            self.optimizer.step()
        if self.zero or self.case.clip != "none":
            self.note(f"{self.where}: norm", {"norm": torch.tensor(float(norm))})
        if self.zero:  # its step releases the gradients
            self.model.zero_grad()

    def _clip(self) -> Any:
        parameters = [p for p in self.named.values() if p.grad is not None]
        if self.zero and self.communicator is None:  # those that were trainable when it was made
            known = {id(p) for p in self.trainable}
            parameters = [p for p in parameters if id(p) in known]
        if not parameters:
            return 0.0
        bound = float("inf") if self.case.clip == "none" else MAX_NORM
        if self.communicator is not None and self.case.clip == "ours":
            return internsp.clip_grad_norm_(parameters, bound)
        if self.case.clip == "none" and not self.zero:
            return 0.0
        norm = torch.nn.utils.clip_grad_norm_(parameters, bound)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _do_zero(self, who: str) -> None:
        if self.zero:
            who = {"to_zero": "model", "kept": "optimizer"}.get(who, who)
        if who == "model":
            self.model.zero_grad()
        elif who == "optimizer":
            self.optimizer.zero_grad()
            for p in self.named.values():  # the optimizer may not have the frozen ones
                p.grad = None
        elif who == "to_zero":
            self.model.zero_grad(set_to_none=False)

    def _do_parameters(self) -> None:
        state = self.model.state_dict()
        self.note(f"{self.where}: parameters", {n: v for n, v in state.items() if n in self.named})

    def _do_evaluate(self, how: str) -> None:
        context: dict[str, Any] = {
            "no_grad": torch.no_grad, "inference": torch.inference_mode,
            "graph": contextlib.nullcontext,
        }  # fmt: skip
        self.model.eval()
        with context[how]():
            self.forward(use=-1)
        self.model.train()

    def _do_forward(self) -> None:
        self.forward()

    def _do_fail(self, where: str, index: int, who: str) -> None:
        self.model.fail = (where, index)
        try:
            self._pass("plain")
        except PlannedError:
            pass
        finally:
            self.model.fail = None
        self._do_zero(who)
        self.model.zero_grad()

    def _do_state(self) -> None:
        self.model.load_state_dict(self.model.state_dict())

    def _do_whole(self) -> None:
        found = {n: whole(p).detach() for n, p in self.named.items()}
        self.note(f"{self.where}: whole parameters", found)

    def _do_keep(self) -> None:
        """What a program keeps of its best step: whole weights, and the optimizer's state."""
        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(self.model, options=options)
        if self.communicator is None:
            state = copy.deepcopy(state)
        self.kept = state, copy.deepcopy(self.optimizer.state_dict())

    def _do_restore(self) -> None:
        if self.kept is None:
            return
        state = {n: v for n, v in self.kept[0].items() if n in self.named}
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(self.model, state, options=options)
        self.optimizer.load_state_dict(copy.deepcopy(self.kept[1]))

    def _do_patch(self, how: str, index: int) -> None:
        """Put another ``forward`` in place, as a library that patches models does."""
        module: nn.Module = self.model if index < 0 else self.model.layers[index]
        old = module.forward
        if self.communicator is None or how == "wrapping":
            module.forward = lambda *a, **k: old(*a, **k)
        elif how == "method":
            module.forward = types.MethodType(type(module).forward, module)
        else:
            module.forward = lambda *a, **k: type(module).forward(module, *a, **k)
        if how == "undone":
            self._do_evaluate("no_grad")
            module.forward = old

    def _do_settings(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5

    def _do_blocks_alone(self) -> None:
        """Run the blocks directly, without the model's forward."""
        if {"same_block_twice", "reversed", "skipped", "run_twice"} & set(self.case.beside):
            return
        generator = torch.Generator().manual_seed(self.case.seed)
        x = torch.randn(1, 2, self.case.width, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            for layer in self.model.layers:
                out = layer(x * 1.0, 0)
                x = out[0] if isinstance(out, tuple) else x if not isinstance(out, Tensor) else out
        self.note(f"{self.where}: output", {"x": x})

    def _do_freeze(self, index: int) -> None:
        """Freeze a parameter, or unfreeze it if it is frozen."""
        if self.trainable:
            p = self.trainable[index % len(self.trainable)]
            p.requires_grad_(not p.requires_grad)
            p.grad = None

    def _do_write(self, how: str, index: int) -> None:
        everyone = list(self.named.values())
        chosen = everyone if index < 0 else [everyone[index % len(everyone)]]
        if how in ("load", "load_assigned"):
            state = {n: v * 1.01 for n, v in self.model.state_dict().items()}
            # One process's optimizer would keep the old parameters.
            assign = how == "load_assigned" and self.communicator is not None
            self.model.load_state_dict(state, assign=assign)
            if how == "load_assigned":  # torch's new parameters have no gradients
                for p in self.named.values() if self.communicator is None else ():
                    p.grad = None
            return
        with torch.no_grad():
            if how.startswith("foreach"):
                torch._foreach_mul_(chosen, 1.01)
            for p in () if how.startswith("foreach") else chosen:
                _write(p, how)
        if how.endswith("_invalidate") and self.communicator is not None:
            self.communicator.invalidate()

    # the optimizer

    def _make_optimizer(self) -> torch.optim.Optimizer:
        cls, settings = CLASSES[self.case.optimizer]
        groups: Any = None
        if self.case.optimizer == "zero_groups":
            groups = [
                {"params": [p for p in self.trainable if p.ndim >= 2], "weight_decay": 0.2},
                {"params": [p for p in self.trainable if p.ndim < 2], "weight_decay": 0.0},
            ]
        if not self.zero:
            return cls(self.model.parameters(), **settings)
        if self.communicator is None:
            return cls(groups or self.trainable, **settings)
        bound = None if self.case.clip == "none" else MAX_NORM
        return internsp.ZeroOptimizer(
            self.communicator, cls, param_groups=groups, max_grad_norm=bound, **settings
        )


def _squares(parameters: list[nn.Parameter]) -> Tensor:
    """A penalty on whole weights, which a program reads outside the model."""
    squares = (whole(p).square().sum() for p in parameters)
    return sum(squares, torch.zeros((), dtype=torch.float64))


def _write(p: nn.Parameter, how: str) -> None:
    if how == "multiply":
        p.mul_(1.01)
    elif how == "copy":
        p.copy_(p * 1.01)
    elif how == "data_multiply":
        p.data.mul_(1.01)
    elif how == "data_subtract":
        p.data -= 0.01 * p.data
    elif how == "data_set":
        p.data = p.data * 1.01
    elif how == "data_copy":
        p.data.copy_(p.data * 0.99)
    elif how == "local_invalidate":
        local = p.to_local() if isinstance(p, DTensor) else p
        local.data.mul_(1.01)
    elif how == "fill_one":
        p.clamp_(-0.3, 0.3)
    elif how == "swap":  # averaged parameters for an evaluation, and back
        kept = p.detach().clone()
        p.copy_(kept * 0.5)
        p.copy_(kept * 1.01)

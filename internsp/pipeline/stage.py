"""A stage of ``torch.distributed.pipelining`` that calls scheduler hooks, for every schedule.

torch's schedules call a stage's ``*_one_chunk`` methods for every chunk and micro-batch, also for
overlapped actions, for which they skip functions that are registered with the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    stage_backward_input,
    stage_backward_weight,
)

from internsp.errors import ConfigError, LayoutError, StructureError
from internsp.pipeline.chunks import MicroBatch
from internsp.pipeline.graph import shared_slot_storages, split_blocker
from internsp.pipeline.hooks import FULL, INPUT, WEIGHT, ComputeAction, SchedulerHook
from internsp.pipeline.messages import Messages
from internsp.wp.communicator import ISPCommunicator

StageForm = Callable[[torch.Size], dict[str, Any]]


class _ParameterStandIn:
    """Replaces a parameter in torch's split backward, which then does not write ``.grad``.

    torch finds the parameter's node in the graph through it. When torch would store the gradient,
    its reduce-scatter has already been launched.
    """

    requires_grad = True
    grad = property(lambda self: None, lambda self, value: None)

    def __init__(self, parameter: nn.Parameter) -> None:
        self.grad_fn = _get_grad_fn_or_grad_acc(parameter)


def weight_backward(weights: Iterator[Any], groups: list[dict[str, Any]]) -> Any:
    """torch's weight backward. Up to 2.12 a node that follows another one of its group would get
    the gradients of that once more, so that each is given what the input backward has saved."""
    handles = [
        node.register_prehook(lambda _, saved=saved: saved)
        for group in groups
        for saved, node in zip(group.get("grads") or (), group["intermediates"], strict=False)
    ]
    try:
        return stage_backward_weight(weights, groups)
    finally:
        for handle in handles:
            handle.remove()


class ISPPipelineStage(PipelineStage):
    """torch's stage for one chunk.

    Args:
        chunk: index among this rank's chunks.
        communicator: the chunk's communicator.
        hooks: called around each action, in order; shared by the stages of a rank.
        splits_backward: whether the chunk can split its backward. If not (blocks that recompute,
            compiled blocks, modules whose weight gradient needs the weight), the schedule's input
            backward computes both gradients.
        form: returns torch's ``input_args`` and ``output_args`` for token ids of a shape; without
            it these are among ``options``.

    Attributes:
        batches: arguments of the micro-batches; replaced before each step. Empty: torch's
            arguments are used.

    Raises:
        ConfigError: neither ``form`` nor ``input_args`` and ``output_args``.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        chunk: int,
        communicator: ISPCommunicator,
        hooks: list[SchedulerHook],
        group: dist.ProcessGroup | None = None,
        splits_backward: bool = True,
        form: StageForm | None = None,
        **options: Any,
    ) -> None:
        given = options.get("input_args"), options.get("output_args")
        if form is None and any(each is None for each in given):
            raise ConfigError(
                f"stage {stage_index} does not say what it takes and returns: give "
                "ISPPipelineStage input_args and output_args, tensors on the meta device"
            )
        super().__init__(submodule, stage_index, num_stages, device, group=group, **options)
        self.chunk = chunk
        self.communicator = communicator
        self.hooks = hooks
        self.splits_backward = splits_backward
        self.batches: Sequence[MicroBatch] = ()
        self.more_runs = False  # whether the schedule runs again in this step
        self._stand_ins: dict[int, _ParameterStandIn] = {}
        self.messages: Messages | None = None  # on the host: ends waits for failed ranks
        self._split_checked = False
        self._form = form
        self._sent: Any = given[1]

    @property
    def needs_shape(self) -> bool:
        """Whether :meth:`take_shape` is still to come."""
        return self._form is not None

    def take_shape(self, ids: torch.Size) -> None:
        """Before the first step: what it takes and returns follows from the shape of token ids."""
        if self._form is None:
            return
        made, self._form = self._form(ids), None
        ranks = self.stage_index_to_group_rank  # the schedule has set it
        # torch takes them when a stage is made, and would else run the chunk to find them.
        super().__init__(
            self.submod, self.stage_index, self.num_stages, self.device, group=self.group, **made
        )
        self.stage_index_to_group_rank, self._sent = ranks, made["output_args"]

    def reset_step(self) -> None:
        """Drop a failed step's graphs, and what it has kept for later backwards."""
        self.clear_runtime_states()
        self.bwd_cache.clear()
        self.backward_state.clear()
        self.dw_runner.clear()

    def action(self, micro_batch: int, part: str = "") -> ComputeAction:
        """The action of this chunk for ``micro_batch``."""
        return ComputeAction(self.stage_index, self.chunk, micro_batch, part)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """See torch's."""
        if self.batches:
            batch = self.batches[fwd_chunk_id]
            args, kwargs = batch.inputs, dict(batch.options)
        action = self.action(fwd_chunk_id)
        for hook in self.hooks:
            hook.before_forward(action)
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        self._check_sent_form(output, fwd_chunk_id)
        for hook in self.hooks:
            hook.after_forward(action, output)
        return output

    def _check_sent_form(self, output: Any, micro_batch: int) -> None:
        """Check ``output`` against the next stage's receive buffer; torch does not."""
        if self.is_last or not isinstance(output, Tensor) or not isinstance(self._sent, Tensor):
            return
        if (output.shape, output.dtype) != (self._sent.shape, self._sent.dtype):
            raise LayoutError(
                f"stage {self.stage_index} on rank {self.communicator.mesh.rank} returns hidden "
                f"states {tuple(output.shape)} {output.dtype} for micro-batch {micro_batch}, but "
                f"the next stage receives {tuple(self._sent.shape)} {self._sent.dtype}: give "
                "Pipeline.create the right shape, and every micro-batch the same one"
            )

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """See torch's; ``full_backward=False`` is the schedule's input backward."""
        if not self.has_backward:
            return
        part = FULL if full_backward else INPUT
        if part == INPUT and not self.splits_backward and not self.is_first:
            part = FULL
        if part == INPUT and self.is_first:
            # No input gradients: torch computes everything in the weight backward.
            super().backward_one_chunk(bwd_chunk_id, loss, False, last_backward)
            return
        action = self.action(bwd_chunk_id, part)
        for hook in self.hooks:
            hook.before_backward(action)
        super().backward_one_chunk(bwd_chunk_id, loss, part == FULL, last_backward)
        self._fill_zeros(bwd_chunk_id)
        for hook in self.hooks:
            hook.after_backward(action)

    def _fill_zeros(self, micro_batch: int) -> None:
        """Zeros to send where no gradient reaches a received input: torch up to 2.12 raises."""
        given = self.bwd_cache.get(micro_batch, ())
        if not self.is_first and any(gradient is None for gradient in given):
            received = [cast("Tensor", info.buffer) for info in self.args_recv_info[micro_batch]]
            self.bwd_cache[micro_batch] = tuple(
                torch.zeros_like(buffer) if gradient is None and buffer.requires_grad else gradient
                for gradient, buffer in zip(given, received, strict=False)
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """See torch's: the schedule's weight backward."""
        if not self.has_backward:
            return
        if not self.splits_backward and not self.is_first:  # done in the input backward
            return
        action = self.action(bwd_chunk_id, FULL if self.is_first else WEIGHT)
        for hook in self.hooks:
            hook.before_backward(action)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        for hook in self.hooks:
            hook.after_backward(action)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Called after the chunk's last micro-batch. Gradients are sums: never scaled."""
        if self.more_runs:
            return
        for hook in self.hooks:
            hook.after_last_micro_batch(self.action(-1))

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Does nothing: gradients are sums (design.md 6)."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """See torch's; the split backward gets stand-ins for the parameters."""
        if backward_type == INPUT:
            self._check_split(bwd_kwargs["stage_output"], bwd_kwargs["input_values"])
            return self._input_backward(**bwd_kwargs)
        if backward_type == WEIGHT:
            return weight_backward(self._trained_parameters(), bwd_kwargs["param_groups"]), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _check_split(self, outputs: Sequence[Tensor], inputs: Sequence[Any]) -> None:
        """Refuse, once, a graph whose gradients torch's split backward would get wrong (WP-5)."""
        if self._split_checked:
            return
        why = split_blocker(outputs, inputs, shared_slot_storages(self.communicator))
        if why:
            raise StructureError(
                f"stage {self.stage_index} cannot compute weight gradients separately from input "
                f"gradients: {why}. Take a schedule with a full backward (1F1B, Interleaved1F1B), "
                "or recompute a block of each chunk (activation_checkpoint): then one backward "
                "computes both"
            )
        self._split_checked = True  # not earlier: after a refusal refuse the next step, too

    def _input_backward(
        self,
        stage_output: Any,
        output_grads: Any,
        input_values: Sequence[Any],
        **others: Any,
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
        """torch's input backward, which up to 2.12 takes tensors alone; a layout is none."""
        wanted = [v for v in input_values if isinstance(v, Tensor) and v.requires_grad]
        found, groups = stage_backward_input(
            stage_output, output_grads, wanted, self._trained_parameters()
        )
        gradients = dict(zip(map(id, wanted), found, strict=True))
        return tuple(gradients.get(id(value)) for value in input_values), groups

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """See torch's, which does not consider that an evaluation has no backward."""
        if not self.has_backward:
            return ()
        return cast("tuple[Tensor | None, ...]", super().get_local_bwd_output(mb_index))

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """See torch's and :meth:`get_local_bwd_output`."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _trained_parameters(self) -> Iterator[Any]:
        """Stand-ins of the trained parameters, in the order in which gradients are computed."""
        communicator = self.communicator
        replicated = communicator.replicated
        members = (*reversed(replicated.sharded), *replicated.members)
        for parameter in (member.parameter for member in members):
            if parameter.requires_grad:
                if id(parameter) not in self._stand_ins:
                    self._stand_ins[id(parameter)] = _ParameterStandIn(parameter)
                yield self._stand_ins[id(parameter)]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """See torch's; without messages to this rank itself (a V schedule, torch 2.11, gloo)."""
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    def _get_recv_ops(self, recv_infos: Any) -> list[dist.P2POp]:
        return self._tracked(super()._get_recv_ops(recv_infos))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See torch's."""
        return self._tracked(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See torch's."""
        return self._tracked(super().get_bwd_send_ops(bwd_chunk_id))

    def _tracked(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        return ops if self.messages is None else self.messages.track(ops)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_forward_infra(*args, **kwargs)
        # torch 2.11 asks once whether a backward follows: not if an evaluation comes first. Later
        # ones ask each time, by the ``tensor_meta`` of an input.
        for info in () if self.is_first else chain(*self.args_recv_info.values()):
            if not hasattr(info, "tensor_meta"):
                cast("Tensor", info.buffer).requires_grad_()
        return found

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Nothing, in the place of torch 2.11's: :meth:`_check_sent_form` looks at what is sent."""

"""A stage of ``torch.distributed.pipelining`` that tells hooks what it does, for every schedule.

torch's schedules call a stage's ``*_one_chunk`` methods for every chunk and micro-batch, overlapped
actions included, where functions registered with the schedule are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
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

from internsp.autograd import tensors
from internsp.errors import LayoutError, StructureError
from internsp.pipeline.backward_parts import grad_ready_order, overwritten, rehearsal
from internsp.pipeline.chunks import MicroBatch
from internsp.pipeline.graph import obstacle
from internsp.pipeline.hooks import FULL, INPUT, WEIGHT, ComputeAction, SchedulerHook
from internsp.pipeline.messages import Messages
from internsp.wp.communicator import ISPCommunicator


class _Sink:
    """Stands for a parameter in torch's split backward: found in the graph, ``.grad`` untouched.

    A weight's gradient is on its way to its owners when torch would store it.
    """

    requires_grad = True
    grad = property(lambda self: None, lambda self, value: None)

    def __init__(self, parameter: nn.Parameter) -> None:
        self.grad_fn = _get_grad_fn_or_grad_acc(parameter)


class ISPPipelineStage(PipelineStage):
    """torch's stage over one chunk.

    Args:
        chunk: index among this rank's chunks.
        communicator: the chunk's own.
        hooks: called around everything, in order; shared by the stages of a rank.
        splits: whether input and weight gradients may be computed apart. Where not (blocks that
            recompute, compiled ones, modules whose weight gradient needs the weight), both are
            computed when the schedule asks for the input gradients.
        batches: what the micro-batches hand in; replaced before each step. Empty: torch's own
            arguments are used.
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
        splits: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group=group, **options)
        self.chunk = chunk
        self.communicator = communicator
        self.hooks = hooks
        self.splits = splits
        self.batches: Sequence[MicroBatch] = ()
        self.more_runs = False  # of the schedule, in this step
        self._sinks: dict[int, _Sink] = {}
        self.messages: Messages | None = None  # on the host: watched, so that no wait is in vain
        self.rehearsing = False
        self._examined = False
        given = options.get("output_args")
        self._promised = (given.shape, given.dtype) if isinstance(given, Tensor) else None

    def forget(self) -> None:
        """After a failed step: its graphs, and what it has kept for later parts."""
        self.clear_runtime_states()
        self.bwd_cache.clear()
        self.backward_state.clear()
        self.dw_runner.clear()

    def action(self, micro_batch: int, part: str = "") -> ComputeAction:
        """This chunk at ``micro_batch``."""
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
        self._keep_promise(output, fwd_chunk_id)
        for hook in self.hooks:
            hook.after_forward(action, output)
        return output

    def _keep_promise(self, output: Any, micro_batch: int) -> None:
        """The next stage receives into a buffer of one shape and dtype; torch does not compare."""
        if self.is_last or not isinstance(output, Tensor):
            return
        found = output.shape, output.dtype
        self._promised = self._promised or found  # torch's inference saw the first micro-batch
        if found != self._promised:
            (shape, dtype), (wanted, kind) = found, self._promised
            raise LayoutError(
                f"stage {self.stage_index} on rank {self.communicator.mesh.rank} returns hidden "
                f"states {tuple(shape)} {dtype} for micro-batch {micro_batch}, but the next stage "
                f"receives {tuple(wanted)} {kind}: give Pipeline.create the right shape (None: "
                "torch finds it out), and every micro-batch the same one"
            )

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """See torch's; ``full_backward=False`` is the schedule's input phase."""
        if not self.has_backward:
            return
        part = FULL if full_backward else INPUT
        if part == INPUT and not self.splits and not self.is_first:
            part = FULL
        if part == INPUT and self.is_first:
            # torch leaves everything to the weight phase: there is no input to give gradients to.
            super().backward_one_chunk(bwd_chunk_id, loss, False, last_backward)
            return
        action = self.action(bwd_chunk_id, part)
        for hook in self.hooks:
            hook.before_backward(action)
        super().backward_one_chunk(bwd_chunk_id, loss, part == FULL, last_backward)
        for hook in self.hooks:
            hook.after_backward(action)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """See torch's: the schedule's weight phase."""
        if not self.has_backward:
            return
        if not self.splits and not self.is_first:  # both came in the input phase
            return
        action = self.action(bwd_chunk_id, FULL if self.is_first else WEIGHT)
        for hook in self.hooks:
            hook.before_backward(action)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        for hook in self.hooks:
            hook.after_backward(action)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The last micro-batch of this chunk is over. Our gradients are sums: never scaled."""
        if self.more_runs:
            return
        for hook in self.hooks:
            hook.after_last_micro_batch(self.action(-1))

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Nothing divides a gradient (DESIGN 6)."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """torch's split functions, with stand-ins for the parameters."""
        if backward_type == INPUT:
            self._examine(bwd_kwargs["stage_output"], bwd_kwargs["input_values"])
            return self._input_gradients(**bwd_kwargs)
        if backward_type == WEIGHT:
            return stage_backward_weight(self._weights(), bwd_kwargs["param_groups"]), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _examine(self, outputs: Sequence[Tensor], inputs: Sequence[Any]) -> None:
        """Once: a graph whose weights torch's split backward would get wrong is refused (WP-5)."""
        if self._examined:
            return
        why = obstacle(outputs, inputs, overwritten(self.communicator))
        if why:
            raise StructureError(
                f"stage {self.stage_index} cannot compute weight gradients apart from input "
                f"gradients: {why}. Take a schedule with a whole backward (1F1B, Interleaved1F1B), "
                "or recompute a block of each chunk (activation_checkpoint): then both come at once"
            )
        self._examined = True  # not before: a step after a refused one must be refused too

    def _input_gradients(
        self,
        stage_output: Any,
        output_grads: Any,
        input_values: Sequence[Any],
        **others: Any,
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
        """torch's input part, which up to 2.12 takes nothing but tensors; a layout is none."""
        wanted = [v for v in input_values if isinstance(v, Tensor) and v.requires_grad]
        found, groups = stage_backward_input(stage_output, output_grads, wanted, self._weights())
        gradients = dict(zip(map(id, wanted), found, strict=True))
        return tuple(gradients.get(id(value)) for value in input_values), groups

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """See torch's, which forgets that an evaluation has no backward."""
        if not self.has_backward:
            return ()
        return cast("tuple[Tensor | None, ...]", super().get_local_bwd_output(mb_index))

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """See torch's and :meth:`get_local_bwd_output`."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _weights(self) -> Iterator[Any]:
        """Trained parameters, in the order in which their gradients shall come."""
        communicator = self.communicator
        cut = [weight.parameter for weight in grad_ready_order(communicator)]
        for parameter in (*cut, *(member.parameter for member in communicator.replicated.members)):
            if parameter.requires_grad:
                if id(parameter) not in self._sinks:
                    self._sinks[id(parameter)] = _Sink(parameter)
                yield self._sinks[id(parameter)]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Without messages to this rank itself, where a V's stages meet: torch 2.11 over gloo."""
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See torch's."""
        return self._watched(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See torch's."""
        return self._watched(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See torch's."""
        return self._watched(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See torch's."""
        return self._watched(super().get_bwd_send_ops(bwd_chunk_id))

    def _watched(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        return ops if self.messages is None else self.messages.watch(ops)

    # torch's shape inference before the first step, where shapes were not given

    @contextmanager
    def _rehearsed(self) -> Iterator[None]:
        self.rehearsing = True
        near = (self.stage_index - 1, self.stage_index + 1)
        peers = {rank for s, rank in self.stage_index_to_group_rank.items() if s in near}
        group, messages = self.group, self.messages
        try:
            with messages.inferring(group, peers) if messages and group else nullcontext():
                yield
        finally:
            self.rehearsing = False

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._rehearsed():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._rehearsed():
            return super()._prepare_backward_infra(*args, **kwargs)

    def _handed_in(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Of the first micro-batch; torch's own where there is none."""
        if not self.batches:
            return args, kwargs
        batch = self.batches[0]
        return batch.inputs if self.is_first else args, dict(batch.options)

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        args, kwargs = self._handed_in(args, kwargs)
        with rehearsal(self.communicator):
            outputs = super()._compute_outputs(*args, module=module, **kwargs)
        if torch.is_grad_enabled():
            # Also where everything up to here is frozen, the next stage gives its input a gradient,
            # as with a given shape: torch's split backward finds weights from there and would lose
            # all their gradients, and what is thawed later would get none.
            for tensor in tensors(outputs):
                if tensor.is_floating_point() and not tensor.requires_grad:
                    tensor.requires_grad_()
        return outputs

    def _compute_input_grads(
        self, outputs: Any, all_fwd_inputs: Sequence[Any], grad_outputs: Any = None
    ) -> Any:
        """Only shape and dtype are wanted, and those are the inputs' own.

        Computing them would run a backward for nothing, by ``torch.autograd.grad``, under which a
        reentrant checkpoint cannot recompute.
        """
        return tuple(
            torch.empty_like(given) if isinstance(given, Tensor) and given.requires_grad else None
            for given in all_fwd_inputs
        )

    def _shape_inference(self, args: Any, kwargs: Any = None) -> Any:
        """torch 2.11 has this in place of both above."""
        args, kwargs = self._handed_in(args, kwargs)
        with rehearsal(self.communicator):
            return cast("Any", super())._shape_inference(args, kwargs)

"""One optimizer step, and one evaluation, of a session."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from internsp.errors import OrderError
from internsp.sp import SequenceLayout
from internsp.train.data import Batch, rows_of
from internsp.train.metrics import StepMetrics
from internsp.train.session import Session
from internsp.wp.schedule import simulate


class StepRunner:
    """Runs steps of a session and measures them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._checked = False

    def step(self, number: int, stop_requested: bool) -> tuple[StepMetrics, bool]:
        """Train on the global batch of step ``number`` (from 0). Collective; blocks.

        Returns:
            The step's metrics, and whether any rank was asked to stop.
        """
        session, config = self.session, self.session.config
        counters = session.communicator.state.counters
        counters.reset()
        session.trace.exposed_seconds = 0.0
        start = time.perf_counter()
        layouts = [self._layout(b) for b in self._micro_batches(number)]
        valid = sum(layout.valid_tokens for layout in layouts)
        tokens, asked = self._sum(float(valid), float(stop_requested))
        lr = session.optimizer.param_groups[0]["lr"]
        loss = torch.zeros((), dtype=torch.float64)
        for layout in layouts:
            loss += self._forward_backward(layout, max(tokens, 1.0))
        norm = session.optimizer.step()
        session.optimizer.zero_grad()
        session.schedule.step()
        (total,) = self._sum(loss.item())
        seconds = time.perf_counter() - start
        self._check_order(config.train.micro_batches)
        metrics = StepMetrics(
            step=number + 1,
            loss=total / max(tokens, 1.0),
            grad_norm=float(norm),
            lr=lr,
            tokens=int(tokens),
            step_seconds=seconds,
            tokens_per_second=tokens / seconds,
            exposed_comm_seconds=session.trace.exposed_seconds,
            gathered_bytes=counters.gathered_bytes,
            reduced_bytes=counters.reduced_bytes,
            peak_memory_bytes=peak_memory_bytes(session.mesh.device),
        )
        return metrics, asked > 0

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Held-out loss in nats a token, the same rows on every mesh; ``None`` without text.

        Every rank runs the same number of batches. Weights move exactly as in training.
        """
        session, train = self.session, self.session.config.train
        total, count = 0.0, 0
        session.model.eval()
        try:
            for index in range(train.micro_batches):
                rows = self._rows(index)
                for batch in session.source.held_out_batches(train.eval_batches, rows=rows):
                    layout = self._layout(batch)
                    loss, valid = self._loss(layout)
                    total += float(loss)
                    count += int(valid)
        finally:
            session.model.train()
        loss_sum, tokens = self._sum(total, float(count))
        return loss_sum / tokens if tokens else None

    def _forward_backward(self, layout: SequenceLayout, divisor: float) -> Tensor:
        trace = self.session.trace
        begin = time.perf_counter()
        loss, _ = self._loss(layout)
        middle = time.perf_counter()
        trace.record("FORWARD", start=begin, end=middle)
        self.session.optimizer.scale(loss / divisor).backward()
        trace.record("BACKWARD", start=middle, end=time.perf_counter())
        return loss.detach().double().cpu()

    def _loss(self, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.session.model(
            layout.input_ids,
            layout=layout,
            labels=layout.labels,
            loss_chunk=self.session.config.train.loss_chunk,
        )
        return result

    def _micro_batches(self, number: int) -> Iterator[Batch]:
        for index in range(self.session.config.train.micro_batches):
            yield self.session.source.train_batch(number, self._rows(index))

    def _rows(self, micro_batch: int) -> slice:
        train, mesh = self.session.config.train, self.session.mesh
        return rows_of(
            train.global_batch,
            micro_batches=train.micro_batches,
            micro_batch=micro_batch,
            data=mesh.data,
            data_rank=mesh.data_rank,
        )

    def _layout(self, batch: Batch) -> SequenceLayout:
        mesh = self.session.mesh
        layout = SequenceLayout.create(
            batch.ids, rank=mesh.sequence_rank, size=mesh.sequence, boundaries=batch.boundaries
        )
        return layout.to(mesh.device)

    def _sum(self, *values: float) -> list[float]:
        """Sum over the ranks of this stage, in fp64."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.session.mesh.device)
        dist.all_reduce(tensor, group=self.session.mesh.stage_group)
        return tensor.tolist()

    def _check_order(self, micro_batches: int) -> None:
        """WP-2: what the first traced step launched is what the plan says, on every rank."""
        trace, plan = self.session.trace, self.session.communicator.plan
        if self._checked or not trace.enabled or plan is None:
            return
        self._checked = True
        kinds = ("AG", "RS")
        overlap = self.session.config.weight_parallel.overlap
        expected = simulate(plan, micro_batches, overlap).lines(kinds)
        actual = trace.lines(kinds)
        if actual == expected:
            return
        at = next(
            (i for i, (a, e) in enumerate(zip(actual, expected, strict=False)) if a != e),
            min(len(actual), len(expected)),
        )
        raise OrderError(
            f"rank {self.session.mesh.rank} launched {len(actual)} collectives where the schedule "
            f"has {len(expected)}; the first difference is number {at}: "
            f"{actual[at : at + 1]} instead of {expected[at : at + 1]}"
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

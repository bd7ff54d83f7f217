"""``ZeroOptimizer``: the step, and new weights on their way to every rank (DESIGN 4)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from internsp.dtensor.unfinished import gradients_lost
from internsp.failure.recovery import unbroken
from internsp.host import OPTIMIZER
from internsp.optim import checkpoint, streamed, whole_state
from internsp.optim.bucket import Bucket, Publication, make_buckets
from internsp.optim.elementwise import OptimizerClass
from internsp.optim.finite import NotFinite, broken_gradients
from internsp.optim.groups import ParamGroups, assign, members
from internsp.optim.guarded import guard_parameter
from internsp.optim.matrices import MatrixSteps
from internsp.optim.methods import methods_of, require_steppable
from internsp.optim.norm import clip_factor, squared_norm
from internsp.optim.reduction import Reducer
from internsp.optim.scaler import LossScaler
from internsp.optim.state_names import Names
from internsp.optim.tied import ZeroGradients
from internsp.optim.whole_state import States
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member

_LOG = logging.getLogger("internsp.optim")


class ZeroOptimizer(torch.optim.Optimizer):
    """Any elementwise torch optimizer with its state cut over the replicas of a shard.

    Gradients stay with the communicator until :meth:`step`, which finishes their reductions in
    launch order, reduce-scatters them over their axis' ``zero_group``, updates this rank's slice
    and sends the new values out by all-gather; the next forward waits for them block by block
    (WP-3). From its making on, ``.grad`` of a parameter has no values while a gradient is
    unfinished: reading them raises (WP-9), ``model.zero_grad()``, ``.grad = None`` and the like
    drop it. ``param_groups`` are the model's parameters, so that torch's learning-rate schedules
    work.

    The norm and the clip follow DESIGN 6: over all parameters of all stages, each counted once.

    Args:
        communicator: what ``parallelize`` returned. Storage of its parameters moves.
        optimizer_class: ``torch.optim.AdamW``, ``SGD``, ... ; called with ``lr`` and ``defaults``.
            One whose step needs a whole parameter (``torch.optim.Muon``, ``Adafactor``, or what is
            declared) steps on one rank, to which the others send their parts of it, one matrix
            after another, while the one before is stepped (:mod:`internsp.optim.matrices`).
        lr: learning rate (``None``: the class's own default).
        whole_matrix: whether a step of ``optimizer_class`` needs a whole parameter; ``None``: if it
            is Muon or Adafactor. Checked by experiment, as far as one shows it.
        max_grad_norm: gradients are clipped to this global norm; ``None``: not clipped.
        param_groups: as for torch; ``None`` puts every trainable parameter into one group. A group
            may have an ``"optimizer"`` of its own, a class, with that one's settings (and
            ``"whole_matrix"``): Muon for matrices of blocks, AdamW for the rest. ``defaults`` are
            not for it, but for ``lr``. Of a 3-D parameter Muon steps each matrix by itself.
        loss_scaler: for fp16. A step that is skipped lowers its scale.
        skip_not_finite: a step whose gradients are not finite on some rank is skipped on all of
            them, with or without clipping: parameters and state stay as they are, the gradients
            are dropped, and rank 0 logs which parameters and ranks it were. The verdict comes
            with the norm, without a message of its own. Always so with a ``loss_scaler``.
        reduce_dtype: what shard-sized sums travel in between replicas, once a step; ``None``: the
            fp32 or wider that they were summed in, so that a gradient is rounded only once.

    Attributes:
        grad_norm: of the last step, a number: the global norm of the unscaled gradient before
            clipping; not finite where some rank's gradient was not, and then the step was skipped.
            NaN before the first step.
        skipped: whether the last step was skipped because gradients were not finite.
        not_finite: where they were not, of the last step; ``None`` if it was not skipped, or if it
            lowered the loss scale, as is usual with fp16.
        skipped_steps: how many steps were skipped so far, for whatever cause.
        skipped_in_a_row: how many of the last ones had ``not_finite``: a loop may want to stop.
        loss_scaler: as given.
        unfinished: whether there are gradients that no step has taken.

    Raises:
        TypeError: the class is not elementwise and not declared, or declared and elementwise; or it
            is neither (LBFGS, SparseAdam).
        ValueError: wrong parameter groups, or a second optimizer for the same communicator, or a
            parameter of which no whole matrix can be stepped (offloaded, tensor parallel, ...).
    """

    def __init__(
        self,
        communicator: ISPCommunicator,
        optimizer_class: OptimizerClass,
        *,
        lr: float | Tensor | None = None,
        max_grad_norm: float | None = None,
        param_groups: ParamGroups | None = None,
        loss_scaler: LossScaler | None = None,
        reduce_dtype: torch.dtype | None = None,
        skip_not_finite: bool = True,
        whole_matrix: bool | None = None,
        **defaults: Any,
    ) -> None:
        if not isinstance(communicator, ISPCommunicator):
            raise TypeError(
                f"ZeroOptimizer was given a {type(communicator).__name__} in the place of the "
                "communicator: give it what parallelize() returned, and the optimizer's class"
            )
        if communicator.plain is None:
            raise ValueError(
                "this communicator has a ZeroOptimizer already: give one optimizer all parameters "
                "and use param_groups"
            )
        if lr is not None:
            defaults["lr"] = lr
        groups, place = assign(communicator, param_groups)
        device = communicator.mesh.device
        methods = methods_of(groups, optimizer_class, whole_matrix, defaults, device)
        for member, index in place.items():
            require_steppable(member, methods[index])
        super().__init__(groups, {})
        # What schedules ask for (OneCycleLR looks for a momentum here); groups have all of it.
        self.defaults = dict(self.param_groups[0])
        del self.defaults["params"]
        self._sealed = True
        self._place = place
        self._communicator = communicator
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm = {max_grad_norm} on rank {communicator.mesh.rank}: steps would go "
                "uphill, or nowhere; give a positive number, or None"
            )
        self.max_grad_norm = max_grad_norm
        self.loss_scaler = loss_scaler
        self.skip_not_finite = skip_not_finite or loss_scaler is not None
        self.grad_norm = math.nan
        self.skipped = False
        self.not_finite: NotFinite | None = None
        self.skipped_steps = self.skipped_in_a_row = 0
        self.unfinished = communicator.plain.unfinished.take()
        self._used: set[Member] = set()
        self._lost: set[Member] = set()  # whose earlier gradients a failed pass has taken with it
        self._kinds: dict[tuple[int, torch.dtype], Names] = {}  # of state, by group
        with torch.no_grad():
            self._buckets = make_buckets(communicator, place, methods)
            for bucket in self._buckets:
                bucket.make_inner(self._settings())
            self._matrices = MatrixSteps(communicator, self._buckets, self._settings())
        if communicator.state.link is not None:
            communicator.state.link.trim()  # of where the shards were
        self._reducer = Reducer(communicator, self._buckets, reduce_dtype)
        for member in members(communicator):
            guard_parameter(member, self, communicator.mesh.rank)
        communicator.plain = None
        communicator.step_gradients = ZeroGradients(
            self._buckets, self._finished, lambda: self._used
        )
        communicator.after_backward.append(self._backward_ended)
        communicator.after_rest.append(self._rested)
        communicator.sums_wait = lambda: self.unfinished

    # the user's loop

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale (fp32 or wider); ``loss`` itself without a scaler."""
        return loss if self.loss_scaler is None else self.loss_scaler.scaled(loss)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the reductions, clip, update, publish. Collective; blocks, but not for the
        publication.

        Args:
            closure: called once, with gradients enabled, before anything else: forward and
                backward (``zero_grad`` too, as for torch).

        Returns:
            What ``closure`` returned (its loss), without one ``None``: as torch's optimizers do.
            The norm is :attr:`grad_norm`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step_together([self])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient. After :meth:`step` there is none, so then it does nothing."""
        self._communicator.recover()
        self._reducer.discard_all()
        self._release()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _drop_gradient(self, member: Member, used: bool) -> None:
        """Forget this rank's part of one gradient. No message; waits for what is in flight.

        After a pass that failed all ranks call it, as :meth:`zero_grad`.

        Args:
            used: it was set to zero, not to ``None``: the next step takes it as zeros.
        """
        self._communicator.recover()
        self._lost.discard(member)
        self._reducer.drop(member, used)
        if not used:
            self._used.discard(member)
        for bucket in self._buckets:
            if bucket.gradient is not None and member in bucket.offsets:
                bucket.drop_gradient(member)

    @torch.no_grad()
    def finish_reductions(self) -> None:
        """Reduce the gradients that are ready into this rank's slices. Collective; blocks. ``step``
        does it.

        Called after each micro-batch it keeps slices instead of shard-sized sums between them, at
        the price of one exchange a micro-batch.
        """
        self._finished()

    def _finished(self) -> set[Member]:
        self._communicator.recover()
        if self._lost:
            raise gradients_lost(len(self._lost), self._communicator.mesh.rank)
        used = self._reducer.run()
        self._used |= used
        return used

    @torch.no_grad()
    def gather_gradients(self) -> dict[str, Tensor]:
        """Whole reduced gradients by parameter name, unscaled, fp32 or wider; unused ones absent.

        For tests and for looking. Collective, blocks, makes everything whole; what :meth:`step`
        will use stays as it is.
        """
        self.finish_reductions()
        found = {}
        for bucket in self._buckets:
            assert bucket.gradient is not None, "finish_reductions gives every bucket a gradient"
            for member, part in bucket.gathered(bucket.gradient).items():
                if member in self._used:
                    found[member.name] = member.wrap(part).full_tensor() * self._unit()
        return found

    # state

    @property
    def state(self) -> Any:  # type: ignore[override]
        """By parameter, this rank's slices of its state, 1-D; :meth:`state_dict` has all of it."""
        return States(self._buckets, self._matrices, self._settings(), self._place)

    @state.setter
    def state(self, value: Any) -> None:
        pass  # torch's own dictionary, which has nothing to hold

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """State and settings in the form of torch's optimizers. Collective; blocks.

        ``{"state": {index: {name: value}}, "param_groups": [...]}``: what has a value for each
        element is a ``DTensor`` like the parameter (``"master"``: the fp32 values of a 16-bit one),
        gathered from the replicas' slices, so that it needs their memory; other meshes and
        optimizers can load it. Unused parameters have the state before a first step. It serves
        ``torch.distributed.checkpoint`` and its ``get_optimizer_state_dict`` and kin.
        :meth:`local_state_dict` takes no memory and no message.

        Raises:
            CollectiveError: not all ranks of the stage call it.
        """
        communicator = self._communicator
        communicator.recover()
        communicator.meeting.same("optimizer", "ZeroOptimizer.state_dict()")
        communicator.publish()
        with unbroken([communicator.recovery], "the optimizer's state_dict()"):
            for bucket in self._buckets:
                bucket.adopt()
            states = whole_state.collect(
                self._buckets, self._matrices, self._settings(), self._place, communicator.mesh
            )
        index = {id(p): i for i, p in enumerate(self._parameters())}
        groups, start = self._settings(), 0
        for settings, group in zip(groups, self.param_groups, strict=True):
            settings["params"] = list(range(start, start + len(group["params"])))
            start += len(group["params"])
        state: dict[str, Any] = {
            "state": {index[id(member.parameter)]: own for member, own in states.items()},
            "param_groups": groups,
        }
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Continue from :meth:`state_dict`, of any mesh and of torch's own optimizer of the class.

        Parameters are matched by their order, whatever they are called (indices, names). Values:
        ``DTensor``, whole tensors, or this rank's part; they are copied. Load the model's own
        values too. Gradients that were not stepped with are dropped. All ranks call it.

        Raises:
            LayoutError: a value of another shape.
            ValueError: other numbers of groups or of parameters in one.
        """
        self._communicator.recover()
        saved = state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in each] for each in (saved, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the state is of groups of {sizes[0]} parameters, this optimizer has {sizes[1]}"
            )
        names = [name for group in saved for name in group["params"]]
        of = {id(m.parameter): m for m in self._place}
        states = {
            of[id(p)]: state_dict["state"].get(name, {})
            for name, p in zip(names, self._parameters(), strict=True)
        }
        self._communicator.publish()
        with unbroken([self._communicator.recovery], "the optimizer's load_state_dict()"):
            whole_state.restore(self._buckets, self._matrices, self._settings(), states)
        self._continue(saved, state_dict)

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's slices of the state, masters, settings and loss scale. Not collective.

        For ``torch.distributed.checkpoint``: entries are by parameter and of its shape, and each
        rank saves and fills its own index ranges of them, so that any mesh loads what any mesh
        saved, without gathering anything. Keys are there before the first step too. Tensors are
        the live ones.
        """
        with torch.no_grad():
            state: dict[str, Any] = {
                "state": checkpoint.collect(
                    self._buckets, self._matrices, self._settings(), self._kinds
                ),
                "param_groups": self._settings(),
            }
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    @torch.no_grad()
    def load_local_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from this rank's :meth:`local_state_dict`, refilled. Not collective.

        Load the model's own values too. Gradients that were not stepped with are dropped.

        Raises:
            LayoutError: another rank's slices, or another model's.
            ValueError: another number of parameter groups.
        """
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(saved)} parameter groups, this optimizer has "
                f"{len(self.param_groups)}"
            )
        checkpoint.restore(self._buckets, self._matrices, state_dict["state"])
        self._continue(saved, state_dict)

    def _continue(self, saved: list[dict[str, Any]], state_dict: dict[str, Any]) -> None:
        """With these settings, without gradients."""
        for group, settings in zip(self.param_groups, saved, strict=True):
            left_out = ("params", "param_names")
            group.update({name: v for name, v in settings.items() if name not in left_out})
        if self.loss_scaler is not None and "loss_scaler" in state_dict:
            self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        self.zero_grad()

    def memory(self) -> list[tuple[str, int]]:
        """(component, bytes) on the device: gradient sums at their largest, optimizer state."""
        sums = sum(b.nbytes for b in self._buckets if not b.small and b.sum is None)
        if self._communicator.replicated.flat is not None:
            flat = self._communicator.replicated.flat
            sums += flat.numel() * flat.element_size()
        state = sum(b.state_nbytes() for b in self._buckets if OPTIMIZER not in b.offload)
        state += self._matrices.state_nbytes()
        return [("gradient sums", sums), ("optimizer state", state)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while being made.

        Raises:
            ValueError: later: buckets are laid out once.
        """
        if getattr(self, "_sealed", False):
            raise ValueError("a ZeroOptimizer's groups are fixed: give all of them when making it")
        super().add_param_group(param_group)

    # inside

    def _update(self, factor: float) -> None:
        settings, whole = self._settings(), [b for b in self._buckets if b.method.whole]
        for bucket in whole:
            bucket.adopt()
            bucket.scale(factor)
        # Matrices travel while slices are stepped.
        slices = partial(self._update_slices, settings, factor)
        self._matrices.step(self._used, settings, slices, self._publish)
        if self._communicator.state.link is not None:
            self._communicator.state.link.rest()  # shards are new where others may read them

    def _update_slices(self, settings: list[dict[str, Any]], factor: float) -> None:
        trace = self._communicator.state.trace
        for bucket in self._buckets:
            if bucket.method.whole:
                continue
            start = trace.now()
            bucket.adopt(masters=bucket.link is None)
            bucket.configure(settings)
            if bucket.link is None:
                bucket.update(self._used, factor)
            else:
                streamed.update(bucket, bucket.link, self._used, factor)
            trace.record("STEP", bucket.name, start=start, end=trace.now())
            self._publish(bucket)

    def _publish(self, bucket: Bucket) -> None:
        """Start the all-gather of a bucket's new slices; its members are ready when it ends."""
        state, axis = self._communicator.state, bucket.axis
        # `.data`: the collective must not raise a version counter that saved tensors share.
        flat, owned = bucket.flat.data, bucket.owned.data
        link = bucket.link if bucket.hosted and axis.zero > 1 else None
        if link is not None:
            flat, owned = streamed.brought(bucket, link)
        handle = state.between[axis].publication.publish(flat, owned, bucket.name)
        if link is not None:  # whole on the device, and home at once: there is little room
            state.collectives.wait(handle, bucket.name, "", "publish")
            handle.keep = ()
            link.store([(bucket.flat, flat)])
        bucket.announce(Publication(state.collectives, handle, bucket.name))

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _settings(self) -> list[dict[str, Any]]:
        """Each group's settings as they are now (a schedule may have changed them)."""
        left_out = ("params", "param_names")
        return [{k: v for k, v in g.items() if k not in left_out} for g in self.param_groups]

    def _unit(self) -> float:
        """What a sum must be multiplied by to be the gradient: mean over ranks, loss scale."""
        communicator = self._communicator
        mean = 1.0 / communicator.mesh.shape.stage_size if communicator.mean else 1.0
        return mean if self.loss_scaler is None else mean / self.loss_scaler.scale

    def _backward_ended(self) -> None:
        self.unfinished = True
        self._reducer.backward_ended()

    def _rested(self, earlier: bool) -> None:
        """A pass has failed, and no sum is left, of ``earlier`` backwards either."""
        lost = self.unfinished and earlier
        self._release()
        if lost:  # until they are dropped by the user, too, a step must not go without them
            self._lost = {m for m in self._place if m.requires_grad}
            self.unfinished = True

    def _release(self) -> None:
        """No gradient is left in the slices."""
        self._lost.clear()
        for bucket in self._buckets:
            bucket.gradient = None
        self._used = set()
        self._reducer.broken.zero_()
        self.unfinished = False

    def _stepped(self, norm: float, skipped: bool, why: NotFinite | None) -> None:
        """Take note of what a step has done."""
        self.grad_norm, self.skipped, self.not_finite = norm, skipped, why
        self.skipped_steps += skipped
        self.skipped_in_a_row = 0 if why is None else self.skipped_in_a_row + 1


@torch.no_grad()
def step_together(optimizers: Sequence[ZeroOptimizer], log: bool = True) -> None:
    """One step of all of them with one norm: a pipeline rank has an optimizer for each chunk.

    Their settings and loss scaler are shared, and so is :attr:`ZeroOptimizer.grad_norm`.
    Collective; see :meth:`ZeroOptimizer.step`.

    Args:
        log: whether rank 0 logs a step that is skipped.
    """
    with unbroken([optimizer._communicator.recovery for optimizer in optimizers]):
        _step_together(optimizers, log)


def _step_together(optimizers: Sequence[ZeroOptimizer], log: bool) -> None:
    first = optimizers[0]
    for optimizer in optimizers:
        optimizer.finish_reductions()
        optimizer._communicator.publish()  # not needed since; the slices are about to change
        optimizer._communicator.settle_gathers()
    mesh, scaler = first._communicator.mesh, first.loss_scaler
    buckets = [bucket for optimizer in optimizers for bucket in optimizer._buckets]
    norm = math.sqrt(squared_norm(buckets, mesh).item()) * first._unit()
    skipped = first.skip_not_finite and not math.isfinite(norm)
    why = None
    if skipped and (scaler is None or scaler.scale <= scaler.min_scale):
        broken = [optimizer._reducer.broken for optimizer in optimizers]
        why = broken_gradients(buckets, torch.stack(broken).any(), mesh)
        if log and mesh.rank == 0:
            _LOG.warning("this step is skipped: gradients are %s", why)
    factor = first._unit() * clip_factor(norm, first.max_grad_norm)
    for optimizer in optimizers:
        # torch's learning-rate schedules warn where they have seen no call of `step`.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        optimizer._stepped(norm, skipped, why)
        if not skipped:
            optimizer._update(factor)
    if scaler is not None:
        scaler.update(skipped)
    for optimizer in optimizers:
        optimizer._release()

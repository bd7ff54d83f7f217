"""``ZeroOptimizer``: the step of sharded weights, and the all-gather of their new values."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from internsp.base.accelerator import HostCopy
from internsp.base.host import OPTIMIZER
from internsp.base.stand_in import OptimizerClass, settings_of
from internsp.dtensor.parameter import StepCount
from internsp.errors import ConfigError
from internsp.failure.recovery import reporting_refusals
from internsp.optim import group_state, streamed
from internsp.optim.bucket import Bucket, make_buckets
from internsp.optim.finite import Marks, NotFinite
from internsp.optim.groups import (
    ParamGroups,
    members_of,
    optimizer_groups,
    require_grouped,
    require_unchanged,
    trainable_members,
)
from internsp.optim.guarded import guard_parameter
from internsp.optim.matrices import MatrixSteps
from internsp.optim.methods import Method, methods_of, require_steppable
from internsp.optim.norm import clip_factor, norm_and_flags
from internsp.optim.reduction import ZeroReducer
from internsp.optim.same_settings import (
    Numbers,
    code_of,
    numbers_in,
    require_one_step,
    require_same,
)
from internsp.optim.scaler import LossScaler
from internsp.optim.state import OptimizerState
from internsp.optim.verdict import Outcome, Verdict, settle
from internsp.wp.communicator import ISPCommunicator
from internsp.wp.parameter import Member, note_held

_LOG = logging.getLogger("internsp.optim")


class ZeroOptimizer(torch.optim.Optimizer):
    """Any elementwise torch optimizer, with its state sharded over the replicas of a weight shard.

    Reduced gradients stay with the communicator until :meth:`step`, which finishes the reductions
    in launch order, reduce-scatters the gradients over their axis' ``zero_group``, updates this
    rank's slice and all-gathers the new values; the next forward waits for these bucket by bucket
    (WP-3). As soon as the optimizer exists, ``.grad`` of a parameter has no values while its
    gradient is unfinished: reading them raises (WP-9); ``model.zero_grad()``, ``.grad = None`` and
    the like drop the gradient. ``param_groups`` are the model's parameters, so that torch's
    learning-rate schedules work.

    The norm and the clip follow design.md 6: over all parameters of all stages, each counted once.

    Of a class of torch's own with ``fused=True`` the update takes clip and verdict from the device:
    the host waits for no step (but a parameter's first), and reads what became of it when the next
    one begins, or when an attribute below is asked for.

    Args:
        communicator: what ``parallelize`` returned. The storage of its parameters moves.
        optimizer_class: ``torch.optim.AdamW``, ``SGD``, ... ; called with ``lr`` and ``defaults``.
            A class whose step needs a whole parameter (``torch.optim.Muon``, ``Adafactor``, or
            one that is declared so) steps each matrix on one rank, to which the others send their
            parts; one matrix is sent while the one before is stepped
            (:mod:`internsp.optim.matrices`).
        lr: learning rate (``None``: the class's own default).
        whole_matrix: whether a step of ``optimizer_class`` needs a whole parameter; ``None``: if it
            is Muon or Adafactor. Checked by experiment, as far as an experiment can show it.
        max_grad_norm: gradients are clipped to this global norm; ``None``: not clipped.
        param_groups: as for torch; ``None`` puts every trainable parameter into one group. Frozen
            ones may be in groups: they get state when they are first trained. A group
            may have an ``"optimizer"`` of its own, a class, with the settings of that class (and
            ``"whole_matrix"``): Muon for matrices of blocks, AdamW for the rest. Of ``defaults``
            such a group takes only ``lr``. Of a 3-D parameter Muon steps each matrix by itself.
        loss_scaler: for fp16. A step that is skipped lowers its scale.
        skip_not_finite: a step whose gradients are not finite on some rank is skipped on all of
            them, with or without clipping: parameters and state stay as they are, the gradients
            are dropped, and rank 0 logs the parameters and the ranks. The verdict comes with the
            norm, without a collective of its own. Always so with a ``loss_scaler``.
        reduce_dtype: the dtype in which gradients are exchanged between replicas, once a step;
            ``None``: that of the sums, fp32 or wider, so that a gradient is rounded only once.

    Attributes:
        grad_norm: the last step's global norm of the unscaled gradient before clipping, a number;
            not finite where some rank's gradient was not, and then the step was skipped. NaN before
            the first step.
        skipped: whether the last step was skipped because gradients were not finite.
        not_finite: the parameters and ranks with such gradients in the last step; ``None`` if it
            was not skipped, or if it lowered the loss scale, as is usual with fp16.
        skipped_steps: how many steps were skipped so far, for whatever cause.
        skipped_in_a_row: how many of the last steps in a row had ``not_finite``: a loop may want to
            stop.
        loss_scaler: as given.

    Raises:
        TypeError: the class is not elementwise and not declared, or declared and elementwise; or it
            is neither (LBFGS, SparseAdam).
        ValueError: wrong parameter groups, or a second optimizer for the same communicator, or a
            parameter that cannot be stepped as a whole matrix (offloaded, tensor parallel, ...).
    """

    grad_norm, skipped = Outcome[float](), Outcome[bool]()
    skipped_steps, skipped_in_a_row = Outcome[int](), Outcome[int]()
    not_finite = Outcome[NotFinite | None]()
    unread: Callable[[], None] | None = None

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
        if lr is not None:
            defaults["lr"] = lr
        groups, group_index = optimizer_groups(communicator, param_groups)
        device = communicator.mesh.device
        methods = methods_of(groups, optimizer_class, whole_matrix, defaults, device)
        for member, index in group_index.items():
            require_steppable(member, methods[index])
        self._class = (optimizer_class, whole_matrix, defaults)  # of groups without their own
        self._buckets: list[Bucket] = []
        super().__init__(groups, {})
        # Learning-rate schedules read these (OneCycleLR a momentum); every group has all settings.
        self.defaults = dict(self.param_groups[0])
        del self.defaults["params"]
        self._group_index, self._methods = group_index, methods
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
        self.not_finite = None
        self.skipped_steps = self.skipped_in_a_row = 0
        self._stepped = StepCount()
        self._matrices = MatrixSteps(communicator)
        self._reducer = ZeroReducer(communicator, self._before_pass, reduce_dtype)
        self._reducer.unfinished = communicator.attach(self._reducer)
        self._marks: Marks | None = None
        self._add_buckets(trainable_members(communicator))

    @property
    def unfinished(self) -> bool:
        """Whether there are gradients that no step has used."""
        return self._reducer.unfinished

    # the user's loop

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale (fp32 or wider); ``loss`` itself without a scaler."""
        return loss if self.loss_scaler is None else self.loss_scaler.scaled(loss)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the reductions, clip, update, and start the parameter all-gathers. Collective;
        blocks until the norm is known, unless all its optimizers are fused ones (see the class).

        Args:
            closure: called once, with gradients enabled, before anything else: forward and
                backward (``zero_grad`` too, as for torch).

        Returns:
            What ``closure`` returned (its loss), ``None`` without one: as torch's optimizers do.
            The norm is :attr:`grad_norm`.
        """
        if torch.compiler.is_dynamo_compiling():
            return _as_it_is(self, closure)
        loss = None
        if closure is not None:  # others wait for this rank in the step, whatever it does then
            recoveries = [self._communicator.recovery]
            with reporting_refusals(recoveries, "a step's closure"), torch.enable_grad():
                loss = closure()
        step_together([self])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient. After :meth:`step` there is none, so that it does nothing then.

        Args:
            set_to_none: has no effect; gradients are never kept as zeros.
        """
        self._communicator.events.recover()
        self._reducer.drop_all_sums()
        self._reducer.clear()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _drop_gradient(self, member: Member, used: bool) -> None:
        """See :class:`internsp.optim.guarded.GradientOwner`."""
        self._reducer.drop_gradient(member, used)

    @torch.no_grad()
    def finish_reductions(self) -> None:
        """Reduce the gradients that are ready into this rank's slices. Collective; blocks.
        :meth:`step` calls it.

        Called after each micro-batch it keeps slices instead of gradients of the shards' size
        between micro-batches, at the price of one exchange for each.
        """
        self._reducer.finalize_gradients()

    @torch.no_grad()
    def gather_gradients(self) -> dict[str, Tensor]:
        """Unsharded reduced gradients by parameter name, unscaled, fp32 or wider; unused ones are
        absent.

        For tests and for inspection. Collective, blocks, gathers all gradients; what :meth:`step`
        will use stays as it is.
        """
        self.finish_reductions()
        found = {}
        for bucket in self._buckets:
            for member, part in bucket.all_gather_slices(bucket.reduced).items():
                if member in self._reducer.used:
                    found[member.name] = member.wrap(part).full_tensor() * self._gradient_factor()
        return found

    def train(self) -> None:
        """``train()`` of schedule-free optimizers: parameters become those that are trained.

        Collective, and blocks, where it changes something; nothing for classes without a ``train``.
        """
        self._switch("train")

    def eval(self) -> None:
        """``eval()`` of schedule-free optimizers: parameters become their averages. As
        :meth:`train`."""
        self._switch("eval")

    def kept_in_groups(self) -> dict[str, dict[str, Any]]:
        """What the optimizers keep in ``param_groups``, by parameter's name in the whole model.

        The same on all ranks of a stage. ``state_dict`` and ``local_state_dict`` have it in
        ``param_groups``; this is for checkpoints whose groups may be others when they are loaded.
        """
        return {
            member.name_in_model: {
                name: self.param_groups[index][name] for name in self._methods[index].kept
            }
            for member, index in self._group_index.items()
            if self._methods[index].kept
        }

    def decides_on_device(self) -> bool:
        """Whether every optimizer takes its verdict from the device. The same on all ranks of a
        stage."""
        return all(
            group.get("fused") and method.takes_verdict
            for group, method in zip(self.param_groups, self._methods, strict=True)
        )

    def group_of_name(self) -> dict[str, int]:
        """The index of each parameter's group, by its name in the whole model."""
        return {member.name_in_model: index for member, index in self._group_index.items()}

    # state

    @property
    def state(self) -> Any:  # type: ignore[override]
        """By parameter, this rank's slices of its state, 1-D; :meth:`state_dict` has all of it.

        To be read: a value's elements may be changed in place, other writes are refused.
        """
        found: Any = self._state().by_parameter()
        for parameter, values in found.items():
            found[parameter] = MappingProxyType(values)
        return MappingProxyType(found)

    @state.setter
    def state(self, value: Any) -> None:
        if hasattr(self, "_reducer"):  # else torch's constructor, whose dictionary is not needed
            raise TypeError(
                f"optimizer.state was assigned on rank {self._communicator.mesh.rank}: a "
                "ZeroOptimizer's state lies in its buckets; to begin it anew, call "
                "load_state_dict() with a state_dict() whose state is empty"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a ZeroOptimizer cannot be copied or pickled: its copy would share buckets and groups. "
            "Copy or save its state_dict()"
        )

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """State and settings in the form of torch's optimizers. Collective; blocks.

        ``{"state": {index: {name: value}}, "param_groups": [...]}``: state with one value for each
        element is a ``DTensor`` like the parameter (``"master"``: the fp32 values of a 16-bit one),
        gathered from the replicas' slices, so that it needs their memory; other meshes and
        optimizers can load it. Unused parameters have the state before a first step. It serves
        ``torch.distributed.checkpoint`` and its ``get_optimizer_state_dict`` and kin.
        :meth:`local_state_dict` needs no memory and no communication.

        Raises:
            CollectiveError: not all ranks of the stage call it.
        """
        communicator = self._communicator
        communicator.events.recover()
        refused = None
        try:
            for before in self._optimizer_state_dict_pre_hooks.values():
                before(self)
        except Exception as error:  # noqa: BLE001 - raised below, when the other ranks know
            refused = error
        communicator.consensus.same("optimizer", "ZeroOptimizer.state_dict()", refused)
        communicator.wait_until_ready()
        self._adopt([member for member in self._frozen() if member.requires_grad])
        with reporting_refusals([communicator.recovery], "the optimizer's state_dict()"):
            for bucket in self._buckets:
                bucket.merge_external_writes()
            states = self._state().gather(communicator.mesh)
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
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Continue from :meth:`state_dict`, of any mesh, or of the same class's torch optimizer.

        Parameters are matched by their order, whatever the keys are (indices, names). Values:
        ``DTensor``, unsharded tensors, or this rank's part; they are copied. Load the model's own
        values too. Gradients that no step has used are dropped. All ranks call it.

        Raises:
            LayoutError: a value of another shape.
            ValueError: other numbers of groups or of parameters in one.
        """
        self._communicator.events.recover()
        state_dict = state_dict.copy()
        with reporting_refusals([self._communicator.recovery], "a hook of load_state_dict()"):
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                changed = before(self, state_dict)
                state_dict = state_dict if changed is None else changed
        saved = state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in each] for each in (saved, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the state is of groups of {sizes[0]} parameters, this optimizer has {sizes[1]}"
            )
        names = [name for group in saved for name in group["params"]]
        of = {id(m.parameter): m for m in self._group_index}
        states = {
            of[id(p)]: state_dict["state"].get(name, {})
            for name, p in zip(names, self._parameters(), strict=True)
        }
        self._communicator.wait_until_ready()
        self._adopt([member for member in self._frozen() if states[member]])
        with reporting_refusals([self._communicator.recovery], "the optimizer's load_state_dict()"):
            self._state().load_gathered(states)
        self._load_settings(saved, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's slices of the state, masters, settings and loss scale. Not collective.

        For ``torch.distributed.checkpoint``: there is an entry for each parameter, of its shape,
        and each rank saves and fills its own index ranges of the entries, so that any mesh loads
        what any mesh saved, without gathering anything. Keys are there before the first step too.
        Tensors are the live ones.
        """
        if not self.unfinished:  # adopted without a message
            self._adopt([member for member in self._frozen() if member.requires_grad])
        with torch.no_grad():
            state: dict[str, Any] = {
                "state": self._state().local(self._frozen()),
                "param_groups": self._settings(),
            }
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    @torch.no_grad()
    def load_local_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from this rank's :meth:`local_state_dict`, refilled. Not collective.

        Load the model's own values too. Gradients that no step has used are dropped.

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
        self._state().load_local(state_dict["state"], self._frozen())
        self._load_settings(saved, state_dict)

    def _load_settings(self, saved: list[dict[str, Any]], state_dict: dict[str, Any]) -> None:
        """Continue with the saved settings and loss scale, without gradients."""
        for group, settings in zip(self.param_groups, saved, strict=True):
            group.update(settings_of(settings))
        if self.loss_scaler is not None and "loss_scaler" in state_dict:
            self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        self.zero_grad()

    def memory(self) -> list[tuple[str, int]]:
        """(component, bytes) on the device: reduced gradients at their largest, optimizer state."""
        sums = sum(b.nbytes for b in self._buckets if not b.replicated and b.host_sum is None)
        if self._communicator.replicated.flat is not None:
            flat = self._communicator.replicated.flat
            sums += flat.numel() * flat.element_size()
        state = sum(b.state_nbytes() for b in self._buckets if OPTIMIZER not in b.offload)
        state += self._matrices.state_nbytes()
        return [("gradient sums", sums), ("optimizer state", state)]

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, trained or frozen ones, as torch's optimizers do. Collective; blocks.

        Settings that the group does not have are those that the optimizer was made with; it may
        have an ``"optimizer"`` of its own. State is made when a parameter is first trained.

        Args:
            param_group: as one of the constructor's ``param_groups``. All ranks of a pipeline's
                stage give the same; its other stages have optimizers of their own.

        Raises:
            ValueError: a parameter is in a group already, or not this communicator's.
            CollectiveError: another rank adds other parameters or settings, refuses, or adds none.
        """
        if not hasattr(self, "_methods"):  # the constructor of torch's class
            super().add_param_group(param_group)
            return
        communicator, index = self._communicator, len(self.param_groups)
        communicator.events.recover()
        refused, added = None, list[Member]()
        methods: list[Method] = []
        group = dict(param_group)
        try:
            added = members_of(communicator, group, "the group to add", self._group_index)
            group["params"] = [member.parameter for member in added]
            methods = methods_of([group], *self._class, communicator.mesh.device)
            for member in added:
                require_steppable(member, methods[0])
        except Exception as error:  # noqa: BLE001 - raised below, when the other ranks know
            refused = error
        names = ", ".join(member.name for member in added)
        settings = {k: v for k, v in sorted(group.items()) if k not in ("params", "param_names")}
        what = f"ZeroOptimizer.add_param_group() of {names} with {settings}"
        communicator.consensus.same("optimizer", what, refused)
        defaults, self.defaults = self.defaults, {}  # the group has all settings of its own class
        try:
            super().add_param_group(group)
        finally:
            self.defaults = defaults
        self._methods += methods
        self._group_index |= dict.fromkeys(added, index)
        if communicator.mesh.pipeline == 1:  # stages do not add at the same time
            self._marks = None

    # inside

    def _frozen(self) -> list[Member]:
        """Parameters in groups that were never trained: they have no bucket and no state yet."""
        bucket_of = self._reducer.bucket_of
        if len(bucket_of) == len(self._group_index):
            return []
        return [member for member in self._group_index if member not in bucket_of]

    def _before_pass(self) -> None:
        """A forward begins, with the same frozen parameters on all ranks: make the state of those
        that are trained for the first time."""
        if torch.is_grad_enabled():
            require_grouped(trainable_members(self._communicator), self._group_index)
        self._adopt([member for member in self._frozen() if member.requires_grad])

    @torch.no_grad()
    def _adopt(self, members: list[Member]) -> None:
        """Take parameters of groups into buckets. Collective where gradients are unfinished."""
        if not members:
            return
        for member in members:
            require_steppable(member, self._methods[self._group_index[member]])
        communicator = self._communicator
        if self.unfinished:  # what is in flight was laid out without them
            names = ", ".join(member.name for member in members)
            communicator.consensus.same("optimizer", f"the first training of {names}")
            self.finish_reductions()
        communicator.wait_until_ready()
        communicator.state.wait_for_gathers()
        versions = {member: member.version() for member in members}
        self._add_buckets(members)
        communicator.events.contents.moved(versions)

    @torch.no_grad()
    def _add_buckets(self, members: Sequence[Member]) -> None:
        """Move the storage of ``members`` into buckets of their own, with state to come."""
        communicator, settings = self._communicator, self._settings()
        note_held(members)
        made = make_buckets(communicator, members, self._group_index, self._methods)
        for bucket in made:
            bucket.make_inner(settings)
        self._matrices.add(made, settings)
        self._buckets.extend(made)
        self._buckets.sort(key=lambda bucket: bucket.order)
        if communicator.state.link is not None:
            communicator.state.link.empty_host_cache()  # the shards have left their old memory
        for member in members:
            member.share(self._stepped)
            guard_parameter(member, self, communicator.mesh.rank)
        self._reducer.declare(self._buckets)

    def _update(self, verdict: Verdict) -> None:
        self._stepped.steps += 1  # copies of the weights in slots are stale (WP-11)
        settings, whole = self._settings(), [b for b in self._buckets if b.method.whole_matrix]
        for bucket in whole:
            bucket.merge_external_writes()
            bucket.scale_gradient(verdict.factor)
        # Matrices are sent while slices are stepped.
        slices = partial(self._update_slices, settings, verdict)
        self._matrices.step(self._reducer.used, settings, slices)
        # What the optimizers keep in their groups after this step is the same on all ranks.
        used = {self._group_index[m] for m in self._reducer.used if m in self._group_index}
        device = self._communicator.mesh.device
        for index, method in enumerate(self._methods):
            if method.kept:
                like, stepped = method.like(device), index in used
                values = group_state.stepped(
                    method.cls, settings[index], method.kept, like, stepped
                )
                self.param_groups[index].update(values)
        self._communicator.events.contents.hand_over(state=True)

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        """Call ``mode``, ``train`` or ``eval``, of the optimizers whose groups it changes."""
        settings, device = self._settings(), self._communicator.mesh.device
        changed = {
            index: values
            for index, method in enumerate(self._methods)
            if method.kept and (values := group_state.switched(
                method.cls, settings[index], method.kept, method.like(device), mode
            ))
        }  # fmt: skip
        if not changed:
            return
        communicator = self._communicator
        communicator.events.recover()
        communicator.consensus.same("optimizer", f"ZeroOptimizer.{mode}()")
        communicator.wait_until_ready()
        communicator.state.wait_for_gathers()
        if communicator.state.link is not None:
            communicator.state.link.synchronize()
        self._stepped.steps += 1
        for bucket in self._buckets:
            if not changed.keys() & {bucket.group_index[member] for member in bucket.offsets}:
                continue
            if bucket.method.whole_matrix:
                raise TypeError(
                    f"{mode}() of {bucket.method.name}, which steps whole matrices: each lies with "
                    "its owner during a step only; take the class's elementwise form"
                )
            bucket.merge_external_writes()
            bucket.set_settings(settings)
            if bucket.inner is not None:
                getattr(bucket.inner, mode)()
            bucket.copy_master_to_owned()
            bucket.publish(communicator.state)
        for index, values in changed.items():
            self.param_groups[index].update(values)

    def _update_slices(self, settings: list[dict[str, Any]], verdict: Verdict) -> None:
        trace, used = self._communicator.state.trace, self._reducer.used
        # Then weights are the rounded masters: 30 bytes an element to find nothing.
        alone = self._communicator.events.contents.left_alone
        for bucket in self._buckets:
            if bucket.method.whole_matrix:
                continue
            start = trace.now()
            if not alone:
                bucket.merge_external_writes(masters=bucket.link is None)
            if bucket.link is None:
                bucket.set_settings(settings)
                bucket.step(used, verdict)
            else:
                streamed.step(bucket, bucket.link, used, settings, verdict, merges=not alone)
            if trace.enabled:
                trace.record("STEP", bucket.name, start=start, end=trace.now())
            bucket.publish(self._communicator.state)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _settings(self) -> list[dict[str, Any]]:
        """Each group's settings as they are now (a schedule may have changed them)."""
        return [settings_of(group) for group in self.param_groups]

    def _state(self) -> OptimizerState:
        return OptimizerState(self._buckets, self._matrices, self._settings())

    def _gradient_factor(self) -> float:
        """The factor from a sum to the gradient: mean over ranks, inverse of the loss scale."""
        mean = 1.0 / self._reducer.divides_by
        return mean if self.loss_scaler is None else mean / self.loss_scaler.scale


@torch._disable_dynamo
def _as_it_is(optimizer: ZeroOptimizer, closure: Callable[[], Any] | None) -> Any:
    """The step that a program has compiled: it communicates, and is not traced."""
    return optimizer.step(closure)


@torch.no_grad()
def step_together(optimizers: Sequence[ZeroOptimizer], log: bool = True) -> None:
    """One step of ``optimizers`` with one norm: a pipeline rank has an optimizer for each chunk.

    They share their settings and loss scaler, and so :attr:`ZeroOptimizer.grad_norm`.
    Collective; see :meth:`ZeroOptimizer.step`.

    Args:
        log: whether rank 0 logs a step that is skipped.

    Raises:
        ConfigError: no optimizer, or several that clip, scale or skip differently.
    """
    with reporting_refusals([optimizer._communicator.recovery for optimizer in optimizers]):
        require_one_step(optimizers)
        for optimizer in optimizers:
            rank = optimizer._communicator.mesh.rank
            require_unchanged(optimizer.param_groups, optimizer._group_index, rank)
            settle(optimizer)
            optimizer.finish_reductions()
            # Parameters that no forward has used since the last step may still be in their
            # all-gather, and the slices are about to change.
            optimizer._communicator.wait_until_ready()
            optimizer._communicator.state.wait_for_gathers()
        verdict = _verdict(optimizers, log)
        for optimizer in optimizers:
            if verdict is not None:
                optimizer._update(verdict)
            # torch's learning-rate schedules warn if `step` was never called.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            optimizer._reducer.clear()


def _verdict(optimizers: Sequence[ZeroOptimizer], log: bool) -> Verdict | None:
    """What the norm decides, ``None`` if the host has read that the step is skipped. It reads what
    came of the step now, or when it is asked for, if the optimizers decide on the device."""
    first = optimizers[0]
    mesh, factor, scaler = first._communicator.mesh, first._gradient_factor(), first.loss_scaler
    reducers = [optimizer._reducer for optimizer in optimizers]
    buckets = [bucket for optimizer in optimizers for bucket in optimizer._buckets]
    own = torch.stack([reducer.local_not_finite for reducer in reducers]).any()
    if first._marks is None:
        first._marks = Marks(mesh, [m for each in optimizers for m in each._group_index])
    numbers = numbers_in(
        (settings, method.kept)
        for each in optimizers
        for settings, method in zip(each._settings(), each._methods, strict=True)
    ) + numbers_in([({"max_grad_norm": first.max_grad_norm}, ())])
    found = norm_and_flags(buckets, mesh, own, first._marks, code_of(numbers))
    result = _Result(first, HostCopy(found), factor, numbers, log)
    late = all(optimizer.decides_on_device() for optimizer in optimizers)
    if not late:
        result.found  # noqa: B018 - the host waits; if a rank has failed meanwhile, it is any number
    for optimizer in optimizers:
        optimizer._communicator.recovery.check_lost("the gradient norm")
    for optimizer in optimizers:
        optimizer.unread = partial(result.tell, optimizer)
    if scaler is not None:
        settle(scaler)
        scaler.unread = partial(settle, first)
    if not late:
        for optimizer in optimizers:
            settle(optimizer)
        clip = clip_factor(first.grad_norm, first.max_grad_norm)
        return None if first.skipped else Verdict(factor * clip)
    total = found[0].sqrt() * factor
    found_inf = total.isfinite().logical_not().to(torch.float32) if first.skip_not_finite else None
    # State that a skipped step makes need not be what an optimizer has before its first step:
    # torch's SGD takes a momentum that nothing has filled.
    begins = any(b.begins(each._reducer.used) for each in optimizers for b in each._buckets)
    if found_inf is not None and begins and first.skipped:
        for reducer in reducers:
            reducer.used.clear()
    return Verdict(factor * clip_factor(total, first.max_grad_norm), found_inf)


class _Result:
    """What became of a step, for the optimizers that share it.

    Args:
        first: the optimizer whose settings count for all.
        copy: what :func:`norm_and_flags` has found.
        factor: from sums to gradients.
        numbers: the settings of the step.
    """

    def __init__(
        self, first: ZeroOptimizer, copy: HostCopy, factor: float, numbers: Numbers, log: bool
    ) -> None:
        assert first._marks is not None, "made before the norm"
        self._first, self._copy, self._factor, self._log = first, copy, factor, log
        self._marks, self._numbers = first._marks, numbers

    def tell(self, optimizer: ZeroOptimizer) -> None:
        """Let ``optimizer`` know; the first of them adapts the loss scale.

        Raises:
            ConfigError: once, from the first: ranks have other settings.
        """
        settle(self._first)
        norm, skipped, why = self._read
        optimizer.grad_norm, optimizer.skipped, optimizer.not_finite = norm, skipped, why
        optimizer.skipped_steps += skipped
        optimizer.skipped_in_a_row = 0 if why is None else optimizer.skipped_in_a_row + 1
        if optimizer is self._first:
            if optimizer.loss_scaler is not None:
                optimizer.loss_scaler.update(skipped)
            try:
                require_same(self._marks, self.found[1 + len(self._marks.all) :], self._numbers)
            except ConfigError:  # if a rank has failed meanwhile, they are any numbers
                optimizer._communicator.recovery.check_lost("the gradient norm")
                raise

    @cached_property
    def found(self) -> list[float]:
        """What :func:`norm_and_flags` has found; the host waits for it."""
        return self._copy.read()

    @cached_property
    def _read(self) -> tuple[float, bool, NotFinite | None]:
        square, *flags = self.found[: 1 + len(self._marks.all)]
        norm, scaler = math.sqrt(square) * self._factor, self._first.loss_scaler
        skipped, why = self._first.skip_not_finite and not math.isfinite(norm), None
        if skipped and (scaler is None or scaler.scale <= scaler.min_scale):
            why = self._marks.not_finite(flags)
            if self._log and self._first._communicator.mesh.rank == 0:
                _LOG.warning("the last step was skipped: gradients are %s", why)
        return norm, skipped, why

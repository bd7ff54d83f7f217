"""The entry and the exit of a ``transformers`` model whose sequences are cut.

The user's loop stays as it is. Every rank of a sequence group gives the model the same whole batch;
a pre-hook checks that, and hands the model this rank's positions. Labels are shifted before the
cut. The loss's *value* is the whole batch's on every rank; its *gradient* is that of this rank's
tokens, divided by the whole batch's count, so that the sum over ranks is right (DESIGN 6).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from internsp.agreement.batch import require_same_batch
from internsp.errors import LayoutError, StructureError
from internsp.hf.attention import Kernel
from internsp.hf.cut import Cut
from internsp.hf.seen import Rows, documents_of
from internsp.mesh import SequenceAxes
from internsp.sp.dispatch import cut as deal
from internsp.sp.exchange import Channel
from internsp.sp.layout import IGNORE_INDEX, SequenceLayout
from internsp.sp.ranges import Ranges, Seen
from internsp.sp.vocabulary import gather_logits

_LOG = logging.getLogger(__name__)

# Inputs that have every position on dimension 1, and are cut there.
_BY_POSITION = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "labels",
                "shift_labels")  # fmt: skip
# Inputs that go on as they are: of the whole batch, or no tensors of positions at all.
_AS_GIVEN = ("attention_mask", "num_items_in_batch", "logits_to_keep", "past_key_values",
             "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # fmt: skip
# Outputs [B, s, ...]; whole where the model is in evaluation mode.
_OF_POSITIONS = ("logits", "last_hidden_state", "hidden_states")


class Entry:
    """The hooks of one model.

    Args:
        model: the ``transformers`` model itself, whatever it is wrapped in.
        channel: the sequence group's.
        axes: which of its ranks share heads, and which are a ring.
        mean: gradients are averaged over ranks later, not summed.
        finds_documents: the model separates documents by ``position_ids`` (``examine``).
        positions_of: of what the model makes positions that it is not given (``examine``).
    """

    def __init__(
        self,
        model: Any,
        kernels: list[Kernel],
        channel: Channel,
        axes: SequenceAxes,
        mean: bool,
        positions_of: str,
        finds_documents: bool,
        device: torch.device,
    ) -> None:
        self.model, self.kernels, self.channel, self.axes = model, kernels, channel, axes
        self.positions_of, self.finds_documents = positions_of, finds_documents
        # What gradients are multiplied by here because they are divided by all ranks later.
        self.weight = float(channel.size) if mean else 1.0
        self.parameters = inspect.signature(type(model).forward).parameters
        self.takes_more = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        self.own_loss = model.loss_function
        self.device = device
        self.as_tuple = False
        self.cut: Cut | None = None
        self.warned = False
        model.loss_function = self._loss
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, always_call=True)
        for module in model.modules():
            if module is not model and hasattr(module, "get_input_embeddings"):
                module.register_forward_hook(self._gather_router_logits)

    # The entry.

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(self.parameters, (model, *args), strict=False))
        del given["self"]
        given |= kwargs
        layout = None if "layout" in self.parameters else given.pop("layout", None)
        self.cut = None
        foreign = self._foreign_kernel()
        dealt = None if layout is None else layout.ranges
        modes = f"training = {model.training}, gradients = {torch.is_grad_enabled()}"
        state = f"{foreign} {dealt} {modes}"
        # First of all: whatever is refused below is then refused by all ranks.
        require_same_batch(given, state, self.channel.group, self.device)
        if foreign is not None:
            raise StructureError(
                f"{foreign} since parallelize(), which would attend to this rank's tokens only: "
                "choose attn_implementation before parallelize()"
            )
        cut = self._cut(given, layout)
        self._set(cut)
        if cut is None:
            return (), given
        self.cut = cut
        return (), self._local(given, cut)

    def _foreign_kernel(self) -> str | None:
        """The attention that no longer looks its kernel up under our name."""
        for kernel in self.kernels:
            for module, name in kernel.names.items():
                now = module.config._attn_implementation  # type: ignore[union-attr]
                if now != kernel.key:
                    return f"{name} uses the attention {now!r}"
        return None

    def _set(self, cut: Cut | None) -> None:
        for kernel in self.kernels:
            kernel.current, kernel.entered = cut, True

    def _cut(self, given: dict[str, Any], layout: SequenceLayout | None) -> Cut | None:
        """The cut of this batch; None where every rank computes the whole of it.

        Args:
            layout: what the user's program deals to the ranks; None: dealt here.

        That is where a cache is used (generation), where only some logits or attention weights are
        asked for, and where there are fewer positions than ranks.
        """
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given.get("inputs_embeds")
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise LayoutError(
                "the model is given neither input_ids [B, S] nor inputs_embeds [B, S, hidden], one "
                "of which is cut over the sequence group"
            )
        size = self.channel.size
        whole = (
            given.get("past_key_values") is not None
            or given.get("use_cache") is True
            or not _is_zero(given.get("logits_to_keep"))
            or bool(given.get("output_attentions"))
            or bool(getattr(self.model.config, "output_attentions", False))
            or tokens.shape[1] < size
        )
        if whole:
            if self.model.training and torch.is_grad_enabled() and not self.warned:
                self.warned = True
                _LOG.warning(
                    "a forward in training is not cut over the %d ranks of the sequence group, "
                    "each of which computes the whole batch: it uses a cache, asks for attention "
                    "weights or for some logits only, or has fewer positions than ranks", size
                )  # fmt: skip
            return None
        from transformers.masking_utils import find_packed_sequence_indices

        batch, length = tokens.shape[:2]
        positions = given.get("position_ids")
        mask = given.get("attention_mask")
        if positions is None:
            if self.positions_of == "tokens" or (self.positions_of and mask is not None):
                raise LayoutError(
                    f"{type(self.model).__name__} makes position_ids of its {self.positions_of} "
                    "where it is given none: give it position_ids where sequences are cut"
                )
            positions = torch.arange(length, device=tokens.device).unsqueeze(0)
        if tuple(positions.shape) not in ((1, length), (batch, length)):
            raise LayoutError(
                f"position_ids must be [1 or B, S] = [{batch}, {length}] where sequences are cut, "
                f"got {list(positions.shape)}"
            )
        wrong = isinstance(mask, Tensor) and not (
            tuple(mask.shape) == (batch, length)
            or (mask.dim() == 4 and tuple(mask.shape[2:]) == (length, length))
        )
        if wrong or not isinstance(mask, Tensor | None):
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise LayoutError(
                f"attention_mask must be [B, S] = [{batch}, {length}] or [B, 1 or heads, S, S] "
                f"where sequences are cut, got {shape}"
            )
        shifted = given.get("shift_labels")
        if shifted is None and given.get("labels") is not None:  # as ForCausalLMLoss shifts them
            shifted = F.pad(given["labels"], (0, 1), value=IGNORE_INDEX)[..., 1:]
        if shifted is not None and tuple(shifted.shape) != (batch, length):
            raise LayoutError(
                f"labels must be [B, S] = [{batch}, {length}], got {list(shifted.shape)}"
            )
        documents = self.finds_documents and mask is None and not self._would_cache(given)
        packed = find_packed_sequence_indices(positions.expand(batch, -1)) if documents else None
        rows = self._documents(packed, mask, length, shifted)
        ranges = self._ranges(length, rows, layout)
        cut = Cut(ranges, self.channel.rank, self.axes, batch, positions, mask, packed, rows)
        if shifted is not None:
            cut.valid = (shifted != IGNORE_INDEX).sum().clamp(min=1)  # no NaN where none counts
            cut.labels = cut.part(shifted).contiguous()
        return cut

    def _ranges(
        self, length: int, rows: Rows | None, layout: SequenceLayout | None
    ) -> tuple[Ranges, ...]:
        """Which positions each rank gets."""
        size, rank = self.channel.size, self.channel.rank
        if layout is None:
            seen = Seen(True, None, rows or ((length,),))
            return deal(length, self.axes, "auto", seen)
        if (layout.length, layout.size, layout.rank) != (length, size, rank):
            raise LayoutError(
                f"the layout is for rank {layout.rank} of {layout.size} and {layout.length} "
                f"positions, but this is rank {rank} of {size} of the sequence group and the "
                f"batch has {length}: make it of this batch, with rank = mesh.sequence_rank and "
                "size = mesh.sequence"
            )
        self.axes.require_layout(layout.axes)
        return layout.ranges

    def _documents(
        self, packed: Tensor | None, mask: Any, length: int, shifted: Tensor | None
    ) -> Rows | None:
        """What a ring must know of documents and padding; None without a ring."""
        if self.axes.ring == 1:
            return None
        counted = None
        if self.model.training and shifted is not None:  # only the loss counts
            counted = torch.ne(shifted, IGNORE_INDEX)
        return documents_of(packed, mask, length, counted)

    def _would_cache(self, given: dict[str, Any]) -> bool:
        """Whether the model by itself would make a cache, and so would not look for documents."""
        if given.get("use_cache") is not None:
            return bool(given["use_cache"])
        checkpoints = getattr(self.model.base_model, "gradient_checkpointing", False)
        default = bool(getattr(self.model.config, "use_cache", False))
        return default and not (checkpoints and self.model.training)

    def _local(self, given: dict[str, Any], cut: Cut) -> dict[str, Any]:
        """What the model is called with: this rank's part."""
        local = {name: self._part(name, value, cut) for name, value in given.items()}
        local["position_ids"] = cut.part(cut.positions)
        if cut.mask is None:
            # Of the whole batch, so that the model finds the number of keys, and no documents in
            # this rank's position_ids: its mask function does, in all of them.
            ones = torch.ones(cut.batch, cut.length, dtype=torch.long, device=cut.positions.device)
            local["attention_mask"] = ones
        elif cut.mask.dim() == 4:  # the model hands it on to its attention
            for kernel in self.kernels:
                kernel.masks.remember(cut.mask, cut, cut.mask.device)
        if "use_cache" in self.parameters or self.takes_more:
            local["use_cache"] = False
        asked = local.pop("return_dict", None)
        default = getattr(self.model.config, "return_dict", True)
        self.as_tuple = (default if asked is None else asked) is False
        if "return_dict" in self.parameters or self.as_tuple:
            local["return_dict"] = True
        return local

    def _part(self, name: str, value: Any, cut: Cut) -> Any:
        if name in _AS_GIVEN or not isinstance(value, Tensor) or not value.dim():
            return value
        if name in _BY_POSITION and value.dim() > 1 and value.shape[1] == cut.length:
            return cut.part(value).contiguous()
        raise StructureError(
            f"the model is given {name} {list(value.shape)}, of which it is not known how it is "
            "cut over the sequence group: leave it out, or make the mesh with sequence = 1"
        )

    # The loss.

    def _loss(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In place of the model's loss function: the same, of this rank's tokens."""
        cut = self.cut
        if cut is None:
            value: Tensor = self.own_loss(logits, labels, *args, **kwargs)
            return value
        from transformers.loss.loss_utils import ForCausalLMLoss

        if self.own_loss is not ForCausalLMLoss:
            raise StructureError(
                f"the model's loss function is {self.own_loss!r}, and only ForCausalLMLoss of "
                "transformers is known to be a sum over tokens: compute the loss from the logits, "
                "or make the mesh with sequence = 1"
            )
        cut.loss_computed = True
        kwargs.pop("shift_labels", None)
        count = kwargs.pop("num_items_in_batch", None)
        if count is None:
            count = cut.valid
        share = ForCausalLMLoss(
            logits, labels, *args, shift_labels=cut.labels, num_items_in_batch=count, **kwargs
        )
        total = share.detach().clone()
        dist.all_reduce(total, group=self.channel.group)
        own = share * self.weight
        return own + (total - own.detach())

    # The exit.

    def _gather_router_logits(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The auxiliary loss of a mixture of experts is no sum over tokens: it needs all."""
        cut = self.cut
        logits = output.get("router_logits") if isinstance(output, Mapping) else None
        if cut is None or not logits:
            return output
        output["router_logits"] = tuple(
            self._whole(x.unflatten(0, (cut.batch, -1)), cut).flatten(0, 1) for x in logits
        )
        return output

    def _leave(self, model: nn.Module, args: Any, output: Any) -> Any:
        cut, self.cut = self.cut, None
        for kernel in self.kernels:
            kernel.current, kernel.entered = None, False
        if output is None:  # an exception is on its way
            return None
        if cut is None:
            return self._shared(output)
        if cut.labels is not None and not cut.loss_computed and output.get("loss") is not None:
            raise StructureError(
                f"{type(model).__name__} computed its loss past its loss_function, from this "
                "rank's labels alone: leave out labels and compute the loss from the logits, or "
                "make the mesh with sequence = 1"
            )
        if not model.training:
            for name in _OF_POSITIONS:
                value = output.get(name)
                if isinstance(value, Tensor):
                    output[name] = self._whole(value, cut)
                elif isinstance(value, tuple):
                    output[name] = tuple(self._whole(x, cut) for x in value)
        return output.to_tuple() if self.as_tuple else output

    def _whole(self, part: Tensor, cut: Cut) -> Tensor:
        """``[B, s, n]`` of each rank to ``[B, S, n]``, of which every rank computes the same."""
        whole: Tensor = _Gathered.apply(part, self.channel, cut, self.weight)
        return whole

    def _shared(self, output: Any) -> Any:
        """Outputs of a whole batch on every rank: the gradient is counted once."""
        factor = self.weight / self.channel.size
        if not torch.is_grad_enabled():
            return output
        if isinstance(output, Mapping):
            for name, value in output.items():
                output[name] = _scaled(value, factor)  # type: ignore[index]
            return output
        return _scaled(output, factor)


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, Tensor) and value.requires_grad:
        return _Scaled.apply(value, factor)
    if isinstance(value, tuple):
        return tuple(_scaled(x, factor) for x in value)
    return value


class _Scaled(torch.autograd.Function):
    """The same value, with a factor on its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


class _Gathered(torch.autograd.Function):
    """All ranks' positions. Since every rank computes the same of them, and so has the whole
    gradient, each keeps the part of its own positions: nothing travels in backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, part: Tensor, channel: Channel, cut: Cut, weight: float
    ) -> Tensor:
        ctx.cut, ctx.weight = cut, weight
        whole = gather_logits(part.flatten(2), channel, cut.sizes)
        return cut.whole(whole).unflatten(2, part.shape[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.cut.part(grad) * ctx.weight, None, None, None


def _is_zero(value: Any) -> bool:
    """Whether ``logits_to_keep`` says "all"."""
    return value is None or (isinstance(value, int) and value == 0)

"""The forward hooks of a ``transformers`` model whose sequences are sharded.

The user's loop does not change. Every rank of a sequence group gives the model the same whole
batch; a forward pre-hook checks that, and gives the model this rank's positions. Labels are shifted
before they are sharded. On every rank the loss has the *value* of the whole batch; its *gradient*
is that of this rank's tokens, divided by the count of the whole batch, so that the sum over ranks
is the gradient of the whole batch (design.md 6).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from internsp.errors import LayoutError, StructureError
from internsp.mesh import ParallelMesh
from internsp.sp.dispatch import rank_ranges
from internsp.sp.exchange import ExchangeGroup
from internsp.sp.hf.attention import SequenceParallelKernel
from internsp.sp.hf.examine import finds_documents, positions_source
from internsp.sp.hf.mask_spec import Rows, documents_of
from internsp.sp.hf.shard import SequenceShard
from internsp.sp.layout import IGNORE_INDEX, SequenceLayout, in_order, indices
from internsp.sp.ranges import MaskSpec, Ranges
from internsp.sp.same_batch import BatchComparison
from internsp.sp.vocabulary import gather_logits

_LOG = logging.getLogger(__name__)

# Inputs with all positions on dimension 1, which is sharded.
_SHARDED_INPUTS = (
    "input_ids", "inputs_embeds", "token_type_ids", "position_ids", "labels", "shift_labels",
)  # fmt: skip
# Inputs that are passed on unchanged: of the whole batch, or without a position dimension.
_UNSHARDED_INPUTS = (
    "attention_mask", "num_items_in_batch", "logits_to_keep", "past_key_values",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
)  # fmt: skip
# Outputs [B, s, ...], which are gathered to [B, S, ...] in evaluation mode.
_SEQUENCE_OUTPUTS = ("logits", "last_hidden_state", "hidden_states")


class ForwardHooks:
    """The forward hooks and the loss function of one model.

    Args:
        model: the ``transformers`` model itself, without wrappers.
        kernels: the attention entries of the model.
        group: the sequence group.
        mean: whether gradients are later averaged over ranks, not summed.
    """

    def __init__(
        self,
        model: Any,
        kernels: list[SequenceParallelKernel],
        group: ExchangeGroup,
        mesh: ParallelMesh,
        mean: bool,
    ) -> None:
        self.model, self.kernels, self.group = model, kernels, group
        self.axes, self.device = mesh.sequence_axes, mesh.device
        self.positions_from, self.finds_documents = positions_source(model), finds_documents(model)
        # Undoes the later division of gradients by the number of ranks of the sequence group.
        self.gradient_factor = float(group.size) if mean else 1.0
        self.model_loss = model.loss_function
        self.as_tuple = False
        self.shard: SequenceShard | None = None
        self.warned = False
        model.loss_function = self._loss
        model.register_forward_pre_hook(self._pre_forward, with_kwargs=True)
        model.register_forward_hook(self._post_forward, always_call=True)
        for module in model.modules():
            if module is not model and hasattr(module, "get_input_embeddings"):
                module.register_forward_hook(self._gather_router_logits)

    # Before the forward.

    def _read_signature(self) -> None:
        """Read the parameters of the model's forward, which a program may replace at any time.

        Those of the class, where a forward takes its positional arguments as a tuple: it passes
        them on.
        """
        found = inspect.signature(self.model.forward).parameters
        if any(p.kind is p.VAR_POSITIONAL for p in found.values()):
            of_class = inspect.signature(type(self.model).forward).parameters
            found = MappingProxyType({n: p for n, p in of_class.items() if n != "self"})
        self.parameters = found
        self.takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in found.values())

    def _pre_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._read_signature()
        given = dict(zip(self.parameters, args, strict=False))
        given |= kwargs
        layout = None if "layout" in self.parameters else given.pop("layout", None)
        self.shard = None
        foreign = self._foreign_kernel()
        given_ranges = None if layout is None else layout.ranges
        modes = f"training = {model.training}, gradients = {torch.is_grad_enabled()}"
        state = f"{foreign} {given_ranges} {modes}"
        # Comes first: with equal batches, all ranks raise the errors below.
        BatchComparison(given, state, self.group.process_group, self.device).require_same()
        if foreign is not None:
            raise StructureError(
                f"{foreign} since parallelize(), which would attend to this rank's tokens only: "
                "choose attn_implementation before parallelize()"
            )
        shard = self._shard(given, layout)
        self.shard = shard
        for kernel in self.kernels:
            kernel.shard, kernel.in_forward = shard, True
        if shard is None:
            return (), given
        return (), self._shard_inputs(given, shard)

    def _foreign_kernel(self) -> str | None:
        """The attention module whose config no longer names internsp's kernel, or None."""
        for kernel in self.kernels:
            for module, name in kernel.names.items():
                now = module.config._attn_implementation  # type: ignore[union-attr]
                if now != kernel.registered_name:
                    return f"{name} uses the attention {now!r}"
        return None

    def _shard(self, given: dict[str, Any], layout: SequenceLayout | None) -> SequenceShard | None:
        """Shard this batch; None where every rank computes the whole batch.

        Args:
            layout: the layout that the user's program gives; None: ranges are chosen here.

        Every rank computes the whole batch where a cache is used (generation), where attention
        weights or only some logits are requested, and with fewer positions than ranks.
        """
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given.get("inputs_embeds")
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise LayoutError(
                "the model is given neither input_ids [B, S] nor inputs_embeds [B, S, hidden], one "
                "of which is cut over the sequence group"
            )
        size, kept = self.group.size, given.get("logits_to_keep")
        whole = (
            given.get("past_key_values") is not None
            or given.get("use_cache") is True
            or not (kept is None or (isinstance(kept, int) and kept == 0))
            or bool(given.get("output_attentions"))
            or bool(self.model.config.output_attentions)
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
            if self.positions_from == "tokens" or (self.positions_from and mask is not None):
                raise LayoutError(
                    f"{type(self.model).__name__} makes position_ids of its {self.positions_from} "
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
        documents = self.finds_documents and mask is None and not self._makes_cache(given)
        packed = find_packed_sequence_indices(positions.expand(batch, -1)) if documents else None
        rows = counted = None
        if self.axes.ring > 1:  # documents and padding; None if the mask is another one
            if self.model.training and shifted is not None:  # only the loss counts
                counted = torch.ne(shifted, IGNORE_INDEX)
            rows = documents_of(packed, mask, length, counted)
        ranges = self._ranges(length, rows, layout)
        shard = SequenceShard(
            ranges, self.group.rank, self.axes, batch, positions, mask, packed, rows
        )
        if shifted is not None:
            shard.valid = (shifted != IGNORE_INDEX).sum().clamp(min=1)  # no NaN where none counts
            shard.labels = shard.own(shifted).contiguous()
        return shard

    def _ranges(
        self, length: int, rows: Rows | None, layout: SequenceLayout | None
    ) -> tuple[Ranges, ...]:
        """The ranges of positions of each rank."""
        size, rank = self.group.size, self.group.rank
        if layout is None:
            seen = MaskSpec(True, None, rows or ((length,),))
            return rank_ranges(length, self.axes, "auto", seen)
        if (layout.length, layout.size, layout.rank) != (length, size, rank):
            raise LayoutError(
                f"the layout is for rank {layout.rank} of {layout.size} and {layout.length} "
                f"positions, but this is rank {rank} of {size} of the sequence group and the "
                f"batch has {length}: make it of this batch, with rank = mesh.sequence_rank and "
                "size = mesh.sequence"
            )
        self.axes.require_layout(layout.axes)
        return layout.ranges

    def _makes_cache(self, given: dict[str, Any]) -> bool:
        """Whether the model would make a cache, and so would not look for documents."""
        if given.get("use_cache") is not None:
            return bool(given["use_cache"])
        checkpoints = getattr(self.model.base_model, "gradient_checkpointing", False)
        default = bool(getattr(self.model.config, "use_cache", False))
        return default and not (checkpoints and self.model.training)

    def _shard_inputs(self, given: dict[str, Any], shard: SequenceShard) -> dict[str, Any]:
        """The arguments of the model for this rank's shard."""
        local = {name: self._shard_input(name, value, shard) for name, value in given.items()}
        local["position_ids"] = shard.own(shard.positions)
        if shard.mask is None:
            # A mask of the whole batch: the model takes the number of keys from it, and does not
            # look for documents in this rank's position_ids. make_mask separates the documents.
            ones = torch.ones(
                shard.batch_size, shard.length, dtype=torch.long, device=shard.positions.device
            )
            local["attention_mask"] = ones
        elif shard.mask.dim() == 4:  # the model passes it on to its attention
            for kernel in self.kernels:
                kernel.masks.add(shard.mask, shard)
        if "use_cache" in self.parameters or self.takes_kwargs:
            local["use_cache"] = False
        return_dict = local.pop("return_dict", None)
        default = getattr(self.model.config, "return_dict", True)
        self.as_tuple = (default if return_dict is None else return_dict) is False
        if "return_dict" in self.parameters or self.as_tuple:
            local["return_dict"] = True
        return local

    def _shard_input(self, name: str, value: Any, shard: SequenceShard) -> Any:
        if name in _UNSHARDED_INPUTS or not isinstance(value, Tensor) or not value.dim():
            return value
        if name in _SHARDED_INPUTS and value.dim() > 1 and value.shape[1] == shard.length:
            return shard.own(value).contiguous()
        raise StructureError(
            f"the model is given {name} {list(value.shape)}, of which it is not known how it is "
            "cut over the sequence group: leave it out, or make the mesh with sequence = 1"
        )

    # The loss.

    def _loss(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replaces the model's loss function: the same loss, of this rank's tokens."""
        shard = self.shard
        if shard is None:
            value: Tensor = self.model_loss(logits, labels, *args, **kwargs)
            return value
        from transformers.loss.loss_utils import ForCausalLMLoss

        if self.model_loss is not ForCausalLMLoss:
            raise StructureError(
                f"the model's loss function is {self.model_loss!r}, and only ForCausalLMLoss of "
                "transformers is known to be a sum over tokens: compute the loss from the logits, "
                "or make the mesh with sequence = 1"
            )
        shard.loss_computed = True
        kwargs.pop("shift_labels", None)
        count = kwargs.pop("num_items_in_batch", None)
        if count is None:
            count = shard.valid
        share = ForCausalLMLoss(
            logits, labels, *args, shift_labels=shard.labels, num_items_in_batch=count, **kwargs
        )
        total = share.detach().clone()
        self.group.all_reduce(total, "the model's loss")
        own = share * self.gradient_factor
        return total + (own - own.detach())  # the same bits on all ranks

    # After the forward.

    def _gather_router_logits(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Gather router logits: the auxiliary loss of experts is no sum over tokens."""
        shard = self.shard
        logits = output.get("router_logits") if isinstance(output, Mapping) else None
        if shard is None or not logits:
            return output
        output["router_logits"] = tuple(
            self._gather(x.unflatten(0, (shard.batch_size, -1)), shard).flatten(0, 1)
            for x in logits
        )
        return output

    def _post_forward(self, model: nn.Module, args: Any, output: Any) -> Any:
        shard, self.shard = self.shard, None
        for kernel in self.kernels:
            kernel.shard, kernel.in_forward = None, False
        if output is None:  # an exception is on its way
            return None
        if shard is None:
            return self._scale_replicated(output)
        if shard.labels is not None and not shard.loss_computed and output.get("loss") is not None:
            raise StructureError(
                f"{type(model).__name__} computed its loss past its loss_function, from this "
                "rank's labels alone: leave out labels and compute the loss from the logits, or "
                "make the mesh with sequence = 1"
            )
        if not model.training:
            for name in _SEQUENCE_OUTPUTS:
                value = output.get(name)
                if isinstance(value, Tensor):
                    output[name] = self._gather(value, shard)
                elif isinstance(value, tuple):
                    output[name] = tuple(self._gather(x, shard) for x in value)
        return output.to_tuple() if self.as_tuple else output

    def _gather(self, part: Tensor, shard: SequenceShard) -> Tensor:
        """Gather ``[B, s, n]`` to ``[B, S, n]``, with which every rank computes the same.

        So each has the whole gradient and keeps that of its own positions: backward communicates
        nothing.
        """
        gathered = gather_logits(part.detach().flatten(2), self.group, shard.sizes)
        whole = in_order(gathered, shard.ranges).unflatten(2, part.shape[2:])
        own = _scale_gradient(part, self.gradient_factor)
        return whole.index_copy_(1, indices(shard.ranges[shard.rank], part.device), own)

    def _scale_replicated(self, output: Any) -> Any:
        """Scale the gradient of outputs that every rank computes, so that it counts once."""
        factor = self.gradient_factor / self.group.size
        if not torch.is_grad_enabled():
            return output
        if isinstance(output, Mapping):
            for name, value in output.items():
                output[name] = _scale_gradient(value, factor)  # type: ignore[index]
            return output
        return _scale_gradient(output, factor)


def _scale_gradient(value: Any, factor: float) -> Any:
    """``value``, of which the gradient is multiplied by ``factor``."""
    if isinstance(value, tuple):
        return tuple(_scale_gradient(x, factor) for x in value)
    if isinstance(value, Tensor) and value.requires_grad:
        scaled = value.view_as(value)
        scaled.register_hook(lambda gradient: gradient * factor)
        return scaled.view_as(scaled)  # a program's hooks and retain_grad() see it unscaled
    return value

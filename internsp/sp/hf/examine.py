"""Which ``transformers`` models support sequence parallelism, and why others do not."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

from internsp.sp.hf.attention import eager_function
from internsp.sp.mixing import Refused, class_functions, mixes_positions

# A module that takes one of these and contains no dispatched attention mixes tokens itself.
_CROSS_TOKEN_ARGUMENTS = frozenset(
    {"attention_mask", "alibi", "cache_params", "past_key_values", "layer_past", "past_key_value"}
)


def find_pretrained_model(model: nn.Module) -> Any:
    """The outermost ``transformers`` model in ``model``, or None."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)


def is_dispatched(module: nn.Module) -> bool:
    """Whether ``module`` is an attention that looks its kernel up in ``AttentionInterface``."""
    from transformers import PreTrainedModel

    return not isinstance(module, PreTrainedModel) and any(
        "get_interface" in function.__code__.co_names for function in class_functions(type(module))
    )


def attentions(model: nn.Module) -> dict[nn.Module, str]:
    """The dispatched attention modules, with their names."""
    return {module: name for name, module in model.named_modules() if is_dispatched(module)}


def refusals(model: nn.Module) -> list[Refused]:
    """Why the model does not support sequence parallelism: modules and reasons, or empty."""
    inner = find_pretrained_model(model)
    found = [*_check_model(inner)]
    if inner is not model and not type(model).__module__.startswith("peft."):
        wraps = (
            f"{type(model).__name__} wraps a {type(inner).__name__}, and what it computes with "
            "this rank's part of its output is not known: give parallelize() the model itself"
        )
        found.insert(0, Refused("", wraps))
    names = attentions(model)
    flagged: set[nn.Module] = set()
    for name, module in reversed(list(model.named_modules())):  # children before parents
        below = [m for m in module.modules() if m is not module]
        if module not in names and any(m in names or m in flagged for m in below):
            continue
        reason = _attention_reason(module) if module in names else _module_reason(module)
        if reason is not None:
            flagged.add(module)
            found.append(Refused(name, reason))
    return found


def _check_model(inner: Any) -> Iterator[Refused]:
    """Reasons in what the model computes before and after its blocks."""
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto as auto

    kind = type(inner).__name__
    causal = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    bodies = set(auto.MODEL_MAPPING_NAMES.values())
    if not (kind in causal | bodies or kind.endswith(("ForCausalLM", "LMHeadModel"))):
        yield Refused("", f"{kind} is no causal language model: its head may look at all positions")
    for name, module in inner.named_modules():
        if isinstance(module, PreTrainedModel):
            parameters = inspect.signature(type(module).forward).parameters
            handed_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and any(
                isinstance(m, PreTrainedModel) for m in module.modules() if m is not module
            )
            if "position_ids" not in parameters and not handed_on:
                reason = "whose forward takes no position_ids: it would count this rank's anew"
                yield Refused(name, f"{type(module).__name__}, {reason}")
    if getattr(inner.config, "is_encoder_decoder", False):
        yield Refused("", f"{kind} has an encoder and a decoder")


def _attention_reason(module: nn.Module) -> str | None:
    """Why a dispatched attention cannot be made parallel, or None."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    kind = type(module).__name__
    config = getattr(module, "config", None)
    kernel = getattr(config, "_attn_implementation", None)
    if kernel is None:
        return f"{kind} has no config that names its attention"
    if kernel == "flex_attention" or kernel.startswith("paged"):
        return f"{kind} uses {kernel}, whose masks are not cut: choose 'sdpa' or flash attention"
    if kernel not in ALL_MASK_ATTENTION_FUNCTIONS:
        return f"{kind} uses {kernel}, which has no mask function (AttentionMaskInterface)"
    if kernel == "eager":
        if eager_function(module) is None:
            return f"the eager attention of {kind} cannot be found: choose another implementation"
        if getattr(module, "reorder_and_upcast_attn", False):
            return f"{kind} with reorder_and_upcast_attn computes past its kernel: set it to False"
    of: type = type(module)
    if not forwards_mask(of):
        return f"{kind} gives its kernel a mask of its own, made of this rank's tokens"
    return None


def _module_reason(module: nn.Module) -> str | None:
    """Why a module other than a dispatched attention is wrong on a shard, or None."""
    kind = type(module).__name__
    if kind.endswith("Pooler"):
        return f"{kind} looks at chosen positions"
    if (reason := mixes_positions(module)) is not None:
        return reason
    # A position embedding may count positions by the mask; it is given position_ids here.
    if type(module).__module__.startswith("torch.") or isinstance(module, nn.Embedding):
        return None
    takes = sorted(_CROSS_TOKEN_ARGUMENTS & set(inspect.signature(type(module).forward).parameters))
    if takes:
        return (
            f"{kind} takes {takes[0]} but does not look its kernel up in transformers' "
            "AttentionInterface: it would see this rank's tokens only"
        )
    return None


def positions_source(inner: Any) -> str:
    """From what the model computes ``position_ids`` if it is given none: "mask", "tokens" or "".

    "" stands for counting from 0. Found in the source files of the model's classes.
    """
    modules = {kind.__module__ for kind in _classes(inner)}
    source = "".join(_source(sys.modules[source_module]) for source_module in modules)
    if "create_position_ids_from_input_ids" in source:
        return "tokens"
    return "mask" if "cumsum(attention_mask" in source else ""


def finds_documents(inner: Any) -> bool:
    """Whether the model passes ``position_ids`` to its mask functions, which find documents there.

    Some families leave that to flash attention; only their source shows it.
    """
    return any(map(_gives_positions, _classes(inner)))


@lru_cache(maxsize=64)
def _gives_positions(kind: type) -> bool:
    for node in ast.walk(ast.parse(textwrap.dedent(_source(kind)))):
        names: set[Any] = set()
        if isinstance(node, ast.Call):
            names = {keyword.arg for keyword in node.keywords}
        elif isinstance(node, ast.Dict):  # arguments shared by several such calls
            names = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if {"config", "attention_mask", "position_ids"} <= names:
            return True
    return False


@lru_cache(maxsize=64)
def forwards_mask(kind: type) -> bool:
    """Whether an attention passes its ``attention_mask`` to its kernel unchanged.

    Read from its source; without source, the first forward checks it.
    """
    nodes = list(ast.walk(ast.parse(textwrap.dedent(_source(kind)))))
    kernels = {
        ast.unparse(target) for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign)
        if "get_interface(" in ast.unparse(node)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }  # fmt: skip
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in kernels:
            named = {k.arg: k.value for k in node.keywords}
            mask = named.get("attention_mask", node.args[4] if len(node.args) > 4 else None)
            if mask is None or ast.unparse(mask) != "attention_mask":
                return False
    return True


def _classes(inner: Any) -> set[type]:
    """The classes of the model and of the models inside it, with all bases in between."""
    from transformers import PreTrainedModel

    kinds = {type(m) for m in inner.modules() if isinstance(m, PreTrainedModel)}
    return {
        base for kind in kinds for base in kind.__mro__
        if issubclass(base, PreTrainedModel) and base is not PreTrainedModel
    }  # fmt: skip


def _source(of: Any) -> str:
    """The source, or "" without a file."""
    try:
        return inspect.getsource(of)
    except (OSError, TypeError):
        return ""

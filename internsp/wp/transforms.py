"""What torch does to whole programs (compile, vmap, create_graph) and cannot do to what travels."""

from __future__ import annotations

import torch

from internsp.errors import GradientError, StructureError

# Whether torch.vmap, torch.func.grad or another of their kind runs (torch has no public name).
transforming = torch._C._are_functorch_transforms_active


def no_second_derivatives() -> None:
    """Called where backward comes to weights that travel.

    Raises:
        GradientError: the backward that runs is recorded (``create_graph=True``).
    """
    if torch.is_grad_enabled():
        raise GradientError(
            "create_graph=True is not supported through a parallel model: the graph of the "
            "gradients would read weights from slots that other blocks have taken by then. Compute "
            "second derivatives (a gradient penalty) on one process, or with finite differences of "
            "two forwards; torch.autograd.grad for inputs without create_graph is right"
        )


def under_transform(name: str) -> StructureError:
    """The error for a whole block, or a module by itself, under ``torch.vmap`` and its kin."""
    return StructureError(
        f"{name} was used under torch.vmap or another transform of torch.func, which cannot keep "
        "its weights for their backward: call the module on the batch itself, use the transform "
        "within a block's forward, or hand whole plain tensors to torch.func.functional_call"
    )


def compiled(name: str) -> StructureError:
    """The error for a module that is compiled past us."""
    return StructureError(
        f"{name} is compiled by torch.compile around what gathers its weights, which no compiler "
        "can trace: have blocks compiled by weight_parallel.compile = true (with trigger 'qkv' or "
        "'rolling'); functions of plain tensors may be compiled freely"
    )


@torch._disable_dynamo
def refuse_compiled(name: str) -> None:
    """Called where ``torch.compile`` meets what moves weights, which it cannot trace.

    Raises:
        StructureError: always. Not from within the traced code, from which no error of ours
            would reach the user.
    """
    raise compiled(name)


def refuse_transformed(name: str, compiles: bool) -> None:
    """Called where a block, or the model, is entered.

    Args:
        compiles: the module was told to compile itself (``module.compile()``).

    Raises:
        StructureError: under ``torch.compile``, ``torch.vmap`` or their kin.
    """
    if compiles or torch.compiler.is_compiling():
        refuse_compiled(name)
    if transforming():
        raise under_transform(name)

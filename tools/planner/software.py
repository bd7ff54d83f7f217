"""What programs of published runs are known to do: facts that a table's columns do not say.

None of it is fitted. A program that is not listed is predicted as torch's FSDP2 in eager mode, and
its rows say so.
"""

from __future__ import annotations

from dataclasses import replace

from internsp.app.plan.workload import Habits, ModelShape, Recompute, Workload

FSDP2 = Habits()
_MEGATRON = Habits(
    fused="kernels",
    kernel="flash3",
    reduce_bytes=2,  # its benchmarks set grad_reduce_in_fp32 to false
    whole_recompute=True,
    tensor_overlap=True,
    tensor_async=True,  # LinearWithGradAccumulationAndAsyncCommunication
    launches=0.0003,
    accumulates=2,  # the product of a weight's gradient adds to the sum
    # To 32 bits; maximum, difference, exponential, sum and quotient one by one; and back.
    loss=(38, 14),
)
SOFTWARE = {
    "mpt": Habits(kernel="flash1"),
    "fms": Habits(fused="compiled", reduce_bytes=2),
    "titan": Habits(fused="eager", keeps_gathers=True, context_balanced=False),
    "maxtext": Habits(fused="compiled", kernel="flash3", reduce_bytes=2, launches=0.0),
    # praxis' DotProductAttention: two einsums and a softmax, unless a row states a fused kernel.
    "paxml": Habits(fused="compiled", kernel="unfused", reduce_bytes=2, launches=0.0),
    "megatron": _MEGATRON,
    "megatron-sft": _MEGATRON,
    "megatron-plain": replace(
        _MEGATRON, reduce_bytes=4, accumulates=6, tensor_overlap=False, overlaps=False
    ),
    # Megatron of 2022: attention as products and a softmax, no parts of sequences, gradients are
    # exchanged after the backward.
    "megatron-unfused": replace(
        _MEGATRON, kernel="unfused", reduce_bytes=2, tensor_sequence=False, tensor_overlap=False,
        overlaps=False, accumulates=6,
    ),
    "automodel": Habits(kernel="flash3"),
    "internevo": Habits(
        fused="kernels", kernel="flash1", reduce_bytes=2, tensor_sequence=False, accumulates=6,
        tensor_async=True,  # the FusedDenseFunc of flash-attn
        owners=True,  # HybridZeroOptimizer.broadcast_params, without overlap_sync_param
    ),
    "alst": Habits(fused="eager", reduce_bytes=2),
    "trl": Habits(fused="eager", kernel="flash3"),  # torch's context parallelism: cuDNN's kernel
    "internsp": Habits(),
}  # fmt: skip
# Sources whose rows are sums of traced parts and not steps (the page on accuracy says how that is
# seen). No constant is fitted on them.
COMPOSED = ("vtrain_single",)
UNKNOWN = "software is unknown: predicted as torch's FSDP2 in eager mode"


def habits_of(name: str) -> Habits | None:
    """The habits of a program, without the ending of its models' kind; ``None`` if unknown."""
    for ending in ("", "-moe"):
        if name.removesuffix(ending) in SOFTWARE:
            return SOFTWARE[name.removesuffix(ending)]
    return None


def as_traced(load: Workload) -> Workload:
    """A step as vTrain's program sums it (its predictor.py, trainer.py, fused_adam.py and model/).

    One block, embedding and head are traced on one device. Nothing is computed again, no gradient
    is added to another, Adam keeps no masters, and gradients take their bytes over the link's rate.
    Dropouts, biases, sums of residuals and two transpositions are passes of their own. The host
    records every launch of a forward; for a backward it is ahead, while the device computes the
    head. Of heads in a number that 4 does not divide, a softmax has six launches: 26, not 21.
    """
    degrees = load.degrees
    fused = load.rows * load.model.heads // degrees.tensor % 4 == 0
    habits = replace(
        load.habits, traced=True, tensor_async=False, accumulates=0, step_bytes=22,
        reduce_bytes=degrees.data / max(1, degrees.data - 1), passes=(12, 24), cut_passes=(4, 30),
        launches=0.0022 * (1 if fused else 26 / 21), launches_behind=0.45,
    )  # fmt: skip
    return replace(load, habits=habits, recompute=Recompute())


def recompute_of(name: str, checkpointing: str, note: str, model: ModelShape) -> Recompute:
    """What a backward recomputes, as shares of a block's forward without its last product."""
    if checkpointing == "full":
        return Recompute(1.0, 1.0, 1.0)
    if checkpointing == "selective-core":
        return Recompute(0.0, 1.0, 0.0)
    if checkpointing != "selective":
        return Recompute()
    if name in ("maxtext", "paxml"):
        # All is kept but the feed-forward; its last product is not needed again.
        first = (1 + model.gated) * model.hidden * model.ffn
        share = first / (first + model.attention_parameters)
        return Recompute(share, float("q, k, v and out" in note), 1.0)
    if name == "titan":
        return Recompute(0.5, 0.0, 1.0)  # every second product, and attention, are kept
    return Recompute(0.5, 0.5, 0.5)  # of every second block

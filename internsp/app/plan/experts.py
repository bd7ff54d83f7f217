"""Experts in a plan: the bytes of gathering weights and of sending tokens, and the choice."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

from torch import nn

from internsp.app.config import Config
from internsp.app.models.factory import build_model
from internsp.app.plan.step import make_plan
from internsp.base.sizes import human
from internsp.experts.owners import dispatched
from internsp.experts.rule import FEW_ROWS, ExpertTraffic
from internsp.mesh import MeshShape
from internsp.structure.dtypes import DTYPES


def experts_traffic(config: Config, world_size: int) -> dict[str, ExpertTraffic]:
    """Both ways of each layer of experts that may have owners, by name; empty without ranks.

    Experts are divided among ``parallel.expert x parallel.expert_weight`` ranks; what a gather
    takes is simulated with all of them as ``expert_weight``, in a pipeline by its own schedule.
    """
    shape = MeshShape(world_size, **config.degrees())
    ranks = shape.experts.size * shape.expert
    layers = {n: (m, k) for n, m in dispatched(build_model(config)).items() if (k := _top_k(m))}
    if ranks == 1 or not layers:
        return {}
    planned = make_plan(divided(config, 1, ranks), world_size)
    train = config.train
    rows = train.global_batch // (train.micro_batches * shape.data)
    token = DTYPES[config.weight_parallel.compute_dtype or train.dtype].itemsize
    found = {}
    for name, (module, top_k) in layers.items():
        number: Any = module.num_experts
        if number % ranks:
            continue
        nbytes = sum(
            action.nbytes for rank in planned.ranks for action in rank.schedule.actions
            if action.kind in ("AG", "RS") and action.weight.startswith(f"{name}.")
        )  # fmt: skip
        found[name] = ExpertTraffic(
            number, top_k, config.model.hidden_size, nbytes // train.micro_batches, ranks,
            rows * config.data.sequence_length // shape.sequence, token, max(token, 4),
            config.activation_checkpoint.mode == "full",
        )  # fmt: skip
    return found


def divided(config: Config, expert: int, expert_weight: int) -> Config:
    """``config`` with experts divided by these degrees."""
    return config.replaced(
        {"parallel.expert": expert, "parallel.expert_weight": expert_weight}
    )


def chosen_experts(config: Config, world_size: int) -> Config:
    """``config`` with a number for ``parallel.expert = "auto"``.

    Tokens travel if they should in every layer; a function of the configuration alone, so that all
    ranks choose alike.
    """
    if config.parallel.expert != "auto":
        return config
    found = experts_traffic(config, world_size)
    ranks = config.parallel.expert_weight or config.parallel.weight
    if found and all(traffic.exchanges for traffic in found.values()):
        return divided(config, ranks, 1)
    return divided(config, 1, ranks)


def expert_lines(config: Config, world_size: int, near: int | None = None) -> Iterator[str]:
    """What a plan prints of experts; layers that are alike are one.

    Args:
        near: ranks of one machine, on fast links; ``None``: not known.
    """
    alike: dict[ExpertTraffic, list[str]] = {}
    axis = MeshShape(world_size, **config.degrees()).experts
    if axis.expert > 1 and axis.size > 1:
        ways = "tokens between near ranks, weights between far ones"
        if not axis.owners_near:
            ways = "weights between near ranks, tokens between far ones"
        yield (
            f"experts have {axis.expert} owners, each cut over {axis.size} ranks: {ways} "
            "(parallel.fast_links)"
        )
    for name, traffic in experts_traffic(config, world_size).items():
        alike.setdefault(traffic, []).append(name)
    for each, names in alike.items():
        more = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
        rows = each.rows_of_an_expert
        yield (
            f"{names[0]}{more}: {each.experts} experts over {each.ranks} ranks, {each.top_k} a "
            f"token; a rank has {each.tokens:,} tokens a micro-batch, {rows:.0f} an expert"
        )
        if rows < FEW_ROWS:
            yield (
                f"  gathered experts would multiply {rows:.0f} rows each: below {FEW_ROWS} their "
                "products are slow"
            )
        received = each.tokens * each.owners
        weights, tokens = (
            f" ({human(int(nbytes * each.far(near)))} of it from other machines)" if near else ""
            for nbytes in (each.gathered, each.exchanged)
        )
        yield (
            f"  weights travel: {human(each.gathered)} a micro-batch{weights}; tokens travel: "
            f"{human(int(each.exchanged))}{tokens}, to {each.owners:.2f} owners each; equal at "
            f"{each.threshold:,.0f} tokens"
        )
        row = each.width * each.token_size
        yield (
            f"  an owner holds {human(int(received * row))} of tokens (expected; at most "
            f"{human(each.tokens * each.ranks * row)})"
        )
        yield f"  {each.verdict()}"
        if factor := config.model.capacity_factor:
            most = ceil(factor * each.top_k * each.tokens / each.experts)
            yield (
                f"  an expert takes at most {most:,} of a rank's tokens (model.capacity_factor); "
                "what it drops does not travel: the bytes above are those without drops"
            )


def _top_k(module: nn.Module) -> int:
    """How many experts a token passes; 0 if it is not known."""
    config = getattr(module, "config", None)
    for name in ("num_experts_per_tok", "top_k", "moe_topk", "moe_k"):
        for holder in (module, config):
            if isinstance(found := getattr(holder, name, None), int):
                return found
    return 0

"""Unmodified models of ``transformers`` whose positions are sharded over a ring of ranks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from internsp.errors import LayoutError, StructureError
from internsp.sp.hf import ring
from internsp.sp.hf.mask_spec import documents_of, mask_spec_of
from internsp.sp.layout import SequenceLayout
from internsp.sp.ranges import MaskSpec
from tests.support import hf
from tests.support.compare import check, close, gradients
from tests.support.hf import HuggingTwin
from tests.support.meshes import mesh_of
from tests.support.models import raises
from tests.support.ranks import ranks

KINDS = {"whole rows": hf.plain_batch, "padding": hf.padded_batch, "packed": hf.packed_batch}


def masked(data: int) -> dict[str, Any]:
    """A user's mask, ``[B, 1, S, S]``: each token sees itself and every second one before it."""
    batch = hf.plain_batch(data)
    length = batch["input_ids"].shape[1]
    apart = torch.arange(length)[:, None] - torch.arange(length)
    return batch | {"attention_mask": ((apart >= 0) & (apart % 2 == 0)).expand(2, 1, -1, -1)}


def holed(data: int) -> dict[str, Any]:
    """Padding in the middle of a row; the tokens on its two sides see each other."""
    batch = hf.plain_batch(data)
    mask = torch.ones_like(batch["input_ids"])
    mask[:, 4:6] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return batch | {"attention_mask": mask, "labels": labels}


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("weight", "sequence", "ring", "near", "world_size"),
    [
        pytest.param(1, 2, 2, "heads", 2, marks=pytest.mark.thorough(8)),
        pytest.param(2, 4, 2, "heads", 4, marks=pytest.mark.thorough(8)), (2, 4, 2, "ring", 4),
        pytest.param(2, 4, 4, "heads", 4, marks=pytest.mark.thorough(5)),
        pytest.param(2, 6, 3, "ring", 6, marks=pytest.mark.thorough(6)),
    ],
    ids=["ring of 2", "heads x ring", "ring x heads", "ring of 4", "ring of 3 x heads"],
)
@ranks()
def test_losses_gradients_and_steps_are_those_of_one_process(
    weight: int, sequence: int, ring: int, near: str, world_size: int
) -> None:
    mesh = mesh_of(weight, sequence, ring=ring, near=near)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("llama", {}), ("mistral", {}), ("gemma2", {}), ("gpt_oss", {}), ("mixtral", {}),
        ("gpt2", {"attn_implementation": "sdpa"}),
    ]  # fmt: skip
    if sequence > 2:  # fewer heads than ranks; soft caps; sinks
        cases = [("llama", {}), ("gemma2", {}), ("gpt_oss", {})]
        cases += [("mistral", {})] * (near == "ring")  # a window
    if sequence > 4:
        cases = cases[::3]
    for family, changes in cases:
        twin = HuggingTwin(family, mesh, changes)
        trace = twin.communicator.state.trace
        trace.enabled = True
        eager = twin.plain.config._attn_implementation == "eager"
        more = {"padding on the left": hf.padded_left, "mask": masked, "hole": holed}
        more = {} if eager else more
        for kind, make in (KINDS | more).items():
            twin.compare(make, f"{family} {changes}, {kind}")
        seen = {event.kind for event in trace.events}
        assert ("RING" in seen) != eager, f"{family}: plain attention goes round, no other"


@ranks(4)
def test_rings_of_rings_are_those_of_one_process() -> None:
    twin = HuggingTwin("llama", mesh_of(2, 4, ring=4), ring_form="double", inner_ring=2)
    twin.communicator.state.trace.enabled = True
    for kind, make in KINDS.items():
        twin.compare(make, kind)
    assert any(event.kind == "RING" for event in twin.communicator.state.trace.events)


@ranks(2)
def test_what_a_user_computes_from_this_ranks_logits_belongs_to_the_layouts_positions() -> None:
    mesh = mesh_of(1, 2, ring=2)
    twin = HuggingTwin("gpt2", mesh, {"attn_implementation": "sdpa"})
    batch = hf.plain_batch(0)
    del batch["labels"]
    tokens = batch["input_ids"]
    layout = SequenceLayout.create(tokens, rank=mesh.sequence_rank, size=2, ring=2)
    assert len(layout.ranges[0]) > 1, "positions are dealt, not cut in two"
    weights = torch.linspace(-1.0, 1.0, tokens.shape[1], dtype=torch.float64).expand(2, -1)

    def loss(logits: Tensor, of: Tensor) -> Tensor:
        return (logits.square().sum(-1) * of).sum()

    loss(twin.plain(**batch).logits, weights).backward()
    loss(twin.ours(**batch).logits, layout.own(weights)).backward()
    check(gradients(twin.ours), gradients(twin.plain), "own loss")
    cut = SequenceLayout.create(
        tokens, rank=mesh.sequence_rank, size=2, ring=2, balance="contiguous"
    )
    twin.ours.zero_grad()
    loss(twin.ours(**batch, layout=cut).logits, cut.own(weights)).backward()
    check(gradients(twin.ours), gradients(twin.plain), "own loss, dealt by the user")
    other = SequenceLayout.create(tokens[:, 1:], rank=mesh.sequence_rank, size=2, ring=2)
    raises(LayoutError, lambda: twin.ours(**batch, layout=other), "10 positions", "has 11")
    if mesh.sequence_rank == 0:
        layout = cut
    raises(LayoutError, lambda: twin.ours(**batch, layout=layout), "other shapes or names")
    whole = twin.ours.generate(tokens, max_new_tokens=1, do_sample=False)
    assert whole.shape[1] == tokens.shape[1] + 1
    few = tokens[:, :1]
    alone = SequenceLayout.create(few, rank=mesh.sequence_rank, size=2, ring=2)
    assert twin.ours(input_ids=few, use_cache=False, layout=alone).logits.shape[1] == 1


@ranks(2)
def test_evaluation_generation_and_recomputed_blocks_are_those_of_one_process() -> None:
    mesh = mesh_of(1, 2, ring=2)
    for family in ("llama", "gemma2"):
        twin = HuggingTwin(family, mesh)
        for kind, make in (("whole rows", hf.plain_batch), ("packed", hf.packed_batch)):
            with torch.no_grad():
                wanted, found = (
                    m.eval()(**make(0), output_hidden_states=True) for m in (twin.plain, twin.ours)
                )
            close(found.logits, wanted.logits, f"{family}, {kind}: logits", hf.SINGLE)
            for one, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
                close(one, other, f"{family}, {kind}: states", hf.SINGLE)
        prompt = hf.plain_batch(0)["input_ids"]
        texts = [m.generate(prompt, max_new_tokens=3, do_sample=False)
                 for m in (twin.plain, twin.ours)]  # fmt: skip
        assert torch.equal(*texts), family
        for reentrant in (False, True):
            for model in (twin.ours.train(), twin.plain.train()):
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            # Two forwards of different lengths, then the backward of both.
            one, two = hf.packed_batch(0), hf.padded_batch(1)
            two = {k: v[:, :9] for k, v in two.items()} | {"use_cache": False}
            for model in (twin.plain, twin.ours):
                (model(**one).loss + model(**two).loss).backward()
            what = f"{family} {reentrant}"
            check(gradients(twin.ours), gradients(twin.plain), what, hf.SINGLE)
            for model in (twin.plain, twin.ours):
                model.zero_grad()


def test_a_rule_is_known_by_what_it_is_and_by_nothing_less() -> None:
    from transformers import masking_utils as masks

    alone = ((6,),)
    assert mask_spec_of(masks.causal_mask_function, alone) == MaskSpec(True, None, alone)
    assert mask_spec_of(masks.bidirectional_mask_function, alone) == MaskSpec(False, None, alone)
    window = masks.sliding_window_causal_mask_function(3)
    assert mask_spec_of(window, alone) == MaskSpec(True, 3, alone)
    assert mask_spec_of(window, None) is None
    chunks = masks.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64))
    both = masks.and_masks(window, masks.causal_mask_function)
    either = masks.or_masks(masks.sliding_window_overlay(2), masks.causal_mask_function)
    ones = masks.sliding_window_bidirectional_mask_function(2)
    for other in (chunks, both, either, ones, lambda b, h, q, k: k <= q):
        assert mask_spec_of(other, alone) is None


def test_documents_are_runs_of_positions_and_a_mask_with_a_hole_is_none() -> None:
    packed = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    assert documents_of(packed, None, 6) == ((2, 3, 1), (1, 5))
    assert documents_of(packed[:1].expand(2, -1), None, 6) == ((2, 3, 1),)
    assert documents_of(None, None, 6) == ((6,),)
    assert documents_of(None, torch.ones(2, 6), 6) == ((6,),)
    padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    assert documents_of(None, padded, 6, padded == 1) == ((2, 4), (5, 1))
    assert documents_of(None, padded, 6) is None, "what is computed for padding may count"
    counted = padded == 1
    counted[0, 1] = True  # the last padding token on the left predicts the first token
    assert documents_of(None, padded, 6, counted) is None
    hole = torch.tensor([[1, 0, 0, 1]])
    assert documents_of(None, hole, 4, hole == 1) is None, "both sides see each other"
    assert documents_of(None, torch.ones(1, 1, 4, 4), 4) is None


def test_only_plain_attention_is_taken_for_it() -> None:
    seen = MaskSpec(True, 4, ((8,),))
    apart = torch.tensor([[0, 1, 2, 0, 1]])
    plain: dict[str, Any] = {"scaling": 0.5, "dropout": 0.0, "is_causal": None, "s_aux": None}
    for kernel in ("sdpa", "flash_attention_2", "kernels-community/flash-attn3"):
        assert ring.is_plain_attention(kernel, seen, None, plain | {"sliding_window": 4})
        others: list[dict[str, Any]] = [
            {"dropout": 0.1}, {"softcap": 30.0}, {"s_aux": apart}, {"position_bias": apart},
            {"is_causal": False},
        ]  # fmt: skip
        for other in others:
            assert not ring.is_plain_attention(kernel, seen, None, plain | other), (kernel, other)
    assert not ring.is_plain_attention("eager", seen, None, plain)
    assert ring.is_plain_attention("sdpa", seen, None, {"sliding_window": 5}), "the mask decides"
    assert not ring.is_plain_attention("flash_attention_2", seen, None, {"sliding_window": 5})
    assert not ring.is_plain_attention("flash_attention_2", seen, None, {"position_ids": apart})
    assert ring.is_plain_attention("flash_attention_2", seen, apart, {"position_ids": apart})


def mask_kernels(model: Any) -> Any:
    """The function that the model's attention finds under the name of its kernel."""
    from transformers import AttentionInterface

    function = AttentionInterface._global_mapping[model.config._attn_implementation]
    alive = inspect.getclosurevars(inspect.unwrap(function)).nonlocals["alive"]
    return alive()


@ranks(2)
def test_a_mask_that_the_ring_does_not_know_is_refused_for_a_kernel_that_takes_none() -> None:
    mesh = mesh_of(1, 2, ring=2)
    twin = HuggingTwin("llama", mesh, {"attention_dropout": 0.5})
    twin.ours(**hf.plain_batch(0)).loss.backward()  # the model's own kernel, over all keys
    hidden = mask_kernels(twin.ours)
    hidden.plain_name = "flash_attention_2"  # needs a device; would be called with dropout
    raises(
        StructureError, lambda: twin.ours(**hf.plain_batch(0)),
        "layers.0.self_attn", "flash_attention_2", "ring = 1",
    )  # fmt: skip

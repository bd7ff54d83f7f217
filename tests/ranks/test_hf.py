"""Unmodified models of ``transformers`` with sharded sequences: the values of one process."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from internsp.config import ActivationCheckpointConfig, WeightParallelConfig
from internsp.errors import LayoutError, StructureError
from internsp.parallel.parallelize import parallelize
from internsp.parallel.sequences import supports
from internsp.sp.heads import even_sizes, spans
from tests.support import hf
from tests.support.compare import check, close, gradients
from tests.support.hf import HuggingTwin
from tests.support.meshes import mesh_of
from tests.support.models import raises
from tests.support.ranks import ranks

KINDS = {"whole rows": hf.plain_batch, "padding": hf.padded_batch, "packed": hf.packed_batch}


@pytest.mark.parametrize(
    ("weight", "world_size"), [(1, 2), pytest.param(2, 4, marks=pytest.mark.thorough(11))],
    ids=["1x2", "2x2"],
)  # fmt: skip
@ranks()
def test_losses_gradients_and_steps_are_those_of_one_process(weight: int, world_size: int) -> None:
    mesh = mesh_of(weight, 2)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("llama", {}),
        ("llama", {"attn_implementation": "eager", "tie_word_embeddings": True}),
        ("mistral", {}), ("gemma2", {}), ("gpt_oss", {}), ("mixtral", {}), ("gpt2", {}),
    ]  # fmt: skip
    for family, changes in cases:
        twin = HuggingTwin(family, mesh, changes)
        eager = twin.plain.config._attn_implementation == "eager"
        more = {} if eager else {"padding on the left": hf.padded_left}
        for kind, make in (KINDS | more).items():
            twin.compare(make, f"{family} {changes}, {kind}")


@ranks(4)
def test_heads_that_the_ranks_do_not_divide_and_ranks_without_any() -> None:
    mesh = mesh_of(2, 4)
    for family in ("llama", "gemma2", "gpt_oss", "gpt2"):  # 6 over 3 heads, or 3: a rank has none
        twin = HuggingTwin(family, mesh)
        twin.compare(hf.packed_batch, f"{family} over four ranks")
    # To the bit, or a program that decides by the loss would part the ranks.
    losses = torch.stack([twin.ours(**hf.packed_batch(i)).loss.detach() for i in range(8)])
    found = [torch.empty_like(losses) for _ in range(4)]
    dist.all_gather(found, losses)
    assert all(torch.equal(each, losses) for each in found)


@pytest.mark.thorough(1)
@ranks(2)
def test_a_loss_of_the_users_own_from_this_ranks_logits_is_right_to_the_last_bits() -> None:
    mesh = mesh_of(1, 2)
    twin = HuggingTwin("gpt2", mesh)
    for make in KINDS.values():
        batch = make(0)
        mine = slice(*spans(even_sizes(batch["input_ids"].shape[1], 2))[mesh.sequence_rank])
        hf.sums(twin.plain, batch).backward()
        hf.sums(twin.ours, batch, mine).backward()
        check(gradients(twin.ours), gradients(twin.plain), "own loss")
        twin.plain.zero_grad()
        twin.ours.zero_grad()


def outputs(model: Any, batch: dict[str, Any], **options: Any) -> dict[str, Any]:
    with torch.no_grad():
        return dict(model.eval()(**batch, **options))


@ranks(2)
def test_evaluation_and_generation_give_what_one_process_gives() -> None:
    mesh = mesh_of(1, 2)
    for family in ("llama", "gemma2", "gpt2", "gpt_oss"):
        twin = HuggingTwin(family, mesh)
        twin.compare(hf.plain_batch, family)
        for kind, make in KINDS.items():
            batch = make(0)
            wanted, found = (
                outputs(m, batch, output_hidden_states=True) for m in (twin.plain, twin.ours)
            )
            for name in ("loss", "logits", "hidden_states"):
                values = (x if isinstance(x, tuple) else (x,) for x in (found[name], wanted[name]))
                for one, other in zip(*values, strict=True):
                    close(one, other, f"{family}, {kind}, {name}", hf.SINGLE)
            del batch["labels"]
            wanted, found = (outputs(m, batch, logits_to_keep=2) for m in (twin.plain, twin.ours))
            close(found["logits"], wanted["logits"], f"{family}, {kind}, two logits", hf.SINGLE)
        eager = twin.plain.config._attn_implementation == "eager"
        prompt = hf.plain_batch(0) if eager else hf.padded_left(0)
        del prompt["labels"]
        for cache in (True, False):
            texts = [
                m.eval().generate(**prompt, max_new_tokens=4, do_sample=False, use_cache=cache)
                for m in (twin.plain, twin.ours)
            ]
            assert torch.equal(*texts), f"{family}, cache {cache}"
        twin.ours.train(), twin.plain.train()
        twin.compare(hf.packed_batch, f"{family} trained on after generating")


@pytest.mark.thorough(3)
@ranks(2)
def test_recomputed_blocks_find_the_batch_of_their_own_forward() -> None:
    mesh = mesh_of(1, 2)
    for family in ("llama", "gpt2"):
        for reentrant in (False, True):
            twin = HuggingTwin(family, mesh)
            for model in (twin.ours, twin.plain):
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            # Two forwards, other lengths and documents, then the backward of both.
            one, two = hf.packed_batch(0), hf.padded_batch(1)
            two = {k: v[:, :9] for k, v in two.items()} | {"use_cache": False}
            for model in (twin.plain, twin.ours):
                (model(**one).loss + model(**two).loss).backward()
            check(gradients(twin.ours), gradients(twin.plain), f"{family} {reentrant}", hf.SINGLE)
    for mode in ("full", "selective"):
        plain = hf.tiny("llama")
        ours = copy.deepcopy(plain)
        checkpoint = ActivationCheckpointConfig(mode=mode)
        parallelize(ours, mesh, activation_checkpoint=checkpoint)
        for model in (plain, ours):
            losses = [model(**make(0)).loss for make in KINDS.values()]
            sum(losses).backward()  # type: ignore[union-attr]
        check(gradients(ours), gradients(plain), mode, hf.SINGLE)


@ranks(2)
def test_auxiliary_losses_and_token_counts_of_the_trainer_are_of_the_whole_batch() -> None:
    mesh = mesh_of(1, 2)
    for family in ("mixtral", "gpt_oss"):
        twin = HuggingTwin(family, mesh)
        for make in (hf.plain_batch, hf.padded_batch):
            for more in ({"output_router_logits": True}, {"num_items_in_batch": 7}):
                twin.compare(
                    lambda data, make=make, more=more: make(data) | more, f"{family} {more}"
                )
    nothing = hf.plain_batch(0)
    nothing["labels"][:] = -100
    loss = twin.ours(**nothing).loss
    loss.backward()
    assert float(loss) == 0.0, "no label counts: no NaN"
    twin.ours.zero_grad()
    means = HuggingTwin("llama", mesh, reduction="mean")  # the mean of equal means
    means.compare(hf.plain_batch, "means")
    batch = hf.plain_batch(0) | {"logits_to_keep": 0, "use_cache": True}  # not sharded, and right
    means.compare(lambda data: batch, "means, not cut")


@ranks(2)
def test_whole_passes_in_training_count_their_gradient_once() -> None:
    twin = HuggingTwin("llama", mesh_of(1, 2))
    twin.compare(lambda data: hf.plain_batch(data) | {"use_cache": True}, "with a cache")
    short = {k: v[:, :1] for k, v in hf.plain_batch(0).items()}
    for model in (twin.plain, twin.ours):
        model(input_ids=short["input_ids"]).logits.square().sum().backward()
    check(gradients(twin.ours), gradients(twin.plain), "fewer tokens than ranks", hf.SINGLE)
    twin.plain.zero_grad(), twin.ours.zero_grad()
    batch = hf.plain_batch(0)
    for model in (twin.plain.eval(), twin.ours.eval()):  # evaluation mode, with gradients
        out = model(**batch)
        (out.loss + out.logits.square().mean()).backward()
    check(gradients(twin.ours), gradients(twin.plain), "evaluation mode", hf.SINGLE)


@ranks(2)
def test_other_ways_of_calling_are_served_too() -> None:
    mesh = mesh_of(1, 2)
    for family in ("llama", "gpt2"):
        twin = HuggingTwin(family, mesh)
        batch = hf.plain_batch(0)
        embedded = dict(batch)
        tokens = embedded.pop("input_ids")
        hidden = twin.plain.get_input_embeddings()(tokens).detach()
        twin.compare(lambda data, b=embedded | {"inputs_embeds": hidden}: b, "embeddings")
        # A user's mask, of another shape than any that the model would make.
        generator = torch.Generator().manual_seed(3)
        mask = torch.rand(2, 1, 11, 11, generator=generator) > 0.4
        mask |= torch.eye(11, dtype=torch.bool)
        if family == "gpt2":  # eager: added to the scores
            mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -30.0)
        twin.compare(lambda data, b=batch | {"attention_mask": mask}: b, f"{family}, own mask")
        wanted, found = (m(**batch, return_dict=False) for m in (twin.plain, twin.ours))
        assert isinstance(found, tuple)
        close(found[0], wanted[0], "in a tuple", hf.SINGLE)
        ids, labels = batch["input_ids"], batch["labels"]
        close(twin.ours(ids, labels=labels).loss, wanted[0], "by position", hf.SINGLE)


@ranks(2)
def test_a_frozen_base_with_adapters_of_peft_is_found_inside() -> None:
    import peft

    def wrapped(model: Any) -> Any:
        torch.manual_seed(1)
        settings = peft.LoraConfig(
            r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(model, settings).double()

    mesh = mesh_of(1, 2)
    plain, ours = wrapped(hf.tiny("llama")), wrapped(hf.tiny("llama"))
    assert supports(ours, mesh) == []
    parallelize(ours, mesh)
    for make in KINDS.values():
        losses = [model(**make(0)).loss for model in (plain, ours)]
        close(losses[1].detach(), losses[0].detach(), "adapters", hf.SINGLE)
        for loss in losses:
            loss.backward()
    check(gradients(ours), gradients(plain), "adapters", hf.SINGLE)
    prompt = hf.plain_batch(0)["input_ids"]
    texts = [m.eval().generate(input_ids=prompt, max_new_tokens=3) for m in (plain, ours)]
    assert torch.equal(*texts)


@pytest.mark.thorough(4)
@pytest.mark.parametrize(
    "config", [{}, {"coalesce_bytes": 65536}, {"gather_before": "rolling"}], ids=str
)
@pytest.mark.parametrize("mode", ["none", "full"])
@ranks(2)
def test_adapters_of_peft_on_parameters_of_experts_are_right(
    mode: Any, config: dict[str, Any]
) -> None:
    import peft

    def wrapped() -> Any:
        torch.manual_seed(1)
        settings = peft.LoraConfig(
            r=2, target_modules=["q_proj"], init_lora_weights=False,
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )  # fmt: skip
        return peft.get_peft_model(hf.tiny("mixtral"), settings).double()

    for weight in (2, 1):
        mesh = mesh_of(weight)
        plain, ours = wrapped(), wrapped()
        names = [name for name, _ in plain.named_parameters()]
        parallelize(
            ours, mesh,
            WeightParallelConfig(**({"min_shard_elements": 32, "coalesce_bytes": 0} | config)),
            activation_checkpoint=ActivationCheckpointConfig(mode=mode),
        )  # fmt: skip
        for _ in range(2):
            sum(plain(**hf.plain_batch(data), use_cache=False).loss for data in range(2)).backward()
            ours(**hf.plain_batch(mesh.data_rank), use_cache=False).loss.backward()
            check(gradients(ours), gradients(plain), f"experts, {config}", hf.SINGLE)
        assert [name for name, _ in ours.named_parameters()] == names
        assert list(ours.state_dict()) == list(plain.state_dict())


@ranks(2)
def test_a_forward_replaced_on_a_model_whose_sequences_are_cut_is_right_or_refused() -> None:
    twin = HuggingTwin("llama", mesh_of(1, 2))

    def renamed(self: Any, tokens: Any, targets: Any = None) -> Any:
        return type(self).forward(self, input_ids=tokens, labels=targets)

    def fused(self: Any, input_ids: Any, labels: Any, **options: Any) -> Any:
        output = type(self).forward(self, input_ids=input_ids, **options)
        output.loss = output.logits.square().mean()
        return output

    batch = hf.plain_batch(0)
    for model in (twin.plain, twin.ours):
        before = model.forward

        def around(*args: Any, before: Any = before, **options: Any) -> Any:
            return before(*args, **options)

        model.forward = around
    twin.compare(lambda data: batch, "a forward that calls the one before")
    twin.ours.forward = MethodType(renamed, twin.ours)
    given = batch["input_ids"], batch["labels"]
    raises(LayoutError, lambda: twin.ours(*given), "neither input_ids")
    twin.ours.forward = MethodType(fused, twin.ours)
    raises(StructureError, lambda: twin.ours(**batch), "computed its loss past its loss_function")


@ranks(2)
def test_two_models_of_one_config_one_of_them_parallel_are_both_right() -> None:
    mesh = mesh_of(1, 2)
    other = hf.tiny("llama")
    ours = type(other)(other.config).double()
    ours.load_state_dict(other.state_dict())
    plain = copy.deepcopy(other)
    key = other.config._attn_implementation
    parallelize(ours, mesh)
    assert other.config._attn_implementation == key
    third = type(ours)(ours.config).double()  # created from the parallel model's config
    third.load_state_dict(plain.state_dict())
    batch = hf.packed_batch(0)
    wanted = plain(**batch).loss
    for model in (ours, other, third, ours):
        close(model(**batch).loss, wanted, "each beside the others", hf.SINGLE)


@ranks(2)
def test_wrong_input_is_named_on_every_rank(rank: int) -> None:
    twin = HuggingTwin("llama", mesh_of(1, 2))
    batch, own = hf.plain_batch(0), hf.plain_batch(rank)
    ours = twin.ours
    raises(LayoutError, lambda: ours(**own), "other values", "mesh.data_rank")
    other_shape = {k: v[:, : 9 + rank] for k, v in batch.items()}
    raises(LayoutError, lambda: ours(**other_shape), "other shapes", "input_ids [2, ")
    raises(LayoutError, lambda: ours(), "neither input_ids")
    only_here = batch if rank else {}
    raises(LayoutError, lambda: ours(**only_here), "other shapes or names")
    ours.train(rank == 0)
    raises(LayoutError, lambda: ours(**batch), "training = ")
    ours.train()
    wrong: list[tuple[type[Exception], dict[str, Any], str]] = [
        (LayoutError, {"position_ids": torch.zeros(3, 2, 11, dtype=torch.long)}, "position_ids"),
        (LayoutError, {"attention_mask": torch.ones(2, 12)}, "attention_mask"),
        (LayoutError, {"labels": torch.ones(2, 5, dtype=torch.long)}, "labels"),
        (StructureError, {"pixel_values": torch.ones(2, 5)}, "pixel_values"),
    ]
    for kind, more, word in wrong:
        raises(kind, lambda more=more: ours(**(batch | more)), word)
    hidden = torch.ones(2, 6, 24, dtype=torch.float64)
    raises(LayoutError, lambda: ours.model.layers[0].self_attn(
        hidden, position_embeddings=(torch.ones(1, 6, 8), torch.ones(1, 6, 8)),
        attention_mask=None), "outside a forward")  # fmt: skip
    ours.set_attn_implementation("eager")
    raises(StructureError, lambda: ours(**batch), "attn_implementation before")


class OwnMask(torch.nn.Module):
    """An input of attention that creates a mask for this rank's tokens only."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        own = torch.ones(1, 1, hidden_states.shape[1], hidden_states.shape[1]).tril() > 0
        return self.attention(hidden_states=hidden_states, attention_mask=own, **kwargs)


@ranks(2)
def test_an_attention_with_a_mask_of_its_own_stops_the_forward() -> None:
    model = hf.tiny("llama")
    block = model.model.layers[1]
    block.self_attn = OwnMask(block.self_attn)
    mesh = mesh_of(1, 2)
    assert supports(model, mesh) == [], "its source does not show it"
    parallelize(model, mesh)
    words = "model.layers.1.self_attn.attention", "not made by the model's mask function"
    raises(StructureError, lambda: model(**hf.plain_batch(0)), *words)


@ranks(2)
def test_what_cut_sequences_refuse_is_right_where_they_are_whole() -> None:
    twin = HuggingTwin("llama", mesh_of(2))
    for model in (twin.plain, twin.ours):
        block = model.model.layers[1]
        block.self_attn = OwnMask(block.self_attn)
    twin.compare(hf.plain_batch, "a mask of its own")


@ranks(2)
def test_a_model_that_makes_positions_of_its_tokens_takes_those_that_it_is_given() -> None:
    twin = HuggingTwin("roberta", mesh_of(1, 2))
    raises(LayoutError, lambda: twin.ours(**hf.plain_batch(0)), "makes position_ids of its tokens")

    def with_positions(data: int) -> dict[str, Any]:
        batch = hf.plain_batch(data)
        length = batch["input_ids"].shape[1]
        return batch | {"position_ids": torch.arange(1, length + 1).repeat(2, 1)}

    twin.compare(with_positions, "given positions")

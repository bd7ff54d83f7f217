"""Building on the meta device, initial values, and generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from internsp.config.model import ModelConfig
from internsp.model_zoo import CausalLM, build, canonical_name, generate, materialize
from internsp.model_zoo.generate import cached


def small(**options: object) -> ModelConfig:
    sizes = {"vocab_size": 40, "hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2}
    return ModelConfig.model_validate({**sizes, **options})


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(model: CausalLM) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "internlm2"])
def test_the_module_names_are_those_the_default_patterns_expect(family: str) -> None:
    attention = ["wq", "wk", "wv", "wo"] if family == "llama" else ["wqkv", "wo"]
    expected = {"embed.weight", "norm.weight", "head.weight"}
    for n in range(2):
        expected |= {f"layers.{n}.attention.{name}.weight" for name in attention}
        expected |= {f"layers.{n}.feed_forward.{name}.weight" for name in ("w1", "w2", "w3")}
        expected |= {f"layers.{n}.attention_norm.weight", f"layers.{n}.ffn_norm.weight"}
    model = build(small(family=family), device="meta")
    assert set(model.state_dict()) == expected
    assert {f"layers.{n}.attention.attend" for n in range(2)} <= dict(model.named_modules()).keys()


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_built_on_meta_and_materialized_equals_one_built_at_once(tied: bool) -> None:
    config = small(tie_embeddings=tied, qkv_bias=True)
    model = build(config, device="meta", dtype=torch.float64)
    assert all(p.is_meta for p in model.parameters())
    assert not list(model.buffers())
    materialize(model, "cpu", seeded())
    at_once = build(config, dtype=torch.float64, generator=seeded())
    torch.testing.assert_close(values(model), values(at_once), rtol=0, atol=0)
    assert (model.head.weight is model.embed.weight) == tied
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(model(ids), at_once(ids))


def test_initial_values_depend_on_name_and_seed_only() -> None:
    config = small()
    model = build(config, generator=seeded())
    again = build(config, dtype=torch.bfloat16, generator=seeded())
    used = seeded()
    torch.rand(7, generator=used)
    for name, parameter in reversed(list(model.named_parameters())):
        alone = torch.full_like(parameter, torch.nan)
        model.initialize(name.replace("layers.1", "layers.1._orig_mod"), alone, used)
        assert torch.equal(alone, parameter), name
        assert torch.equal(again.get_parameter(name), parameter.bfloat16()), name
    other = build(config, generator=seeded(4))
    assert not torch.equal(other.head.weight, model.head.weight)
    assert not torch.equal(model.layers[0].attention.wq.weight, model.layers[1].attention.wq.weight)


def test_a_model_built_without_a_generator_follows_manual_seed() -> None:
    def under(seed: int) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return build(small()).embed.weight

    assert torch.equal(under(11), under(11))
    assert not torch.equal(under(11), under(12))


def test_initial_values_have_the_stated_spread() -> None:
    model = build(small(hidden_size=128, init_std=0.05, bias=True), generator=seeded())
    found = values(model)
    residual = 0.05 / 2  # two layers, so sqrt(2 * 2)
    for name, std in {
        "embed": 0.05,
        "head": 0.05,
        "layers.0.attention.wk": 0.05,
        "layers.1.feed_forward.w1": 0.05,
        "layers.1.feed_forward.w2": residual,
        "layers.0.attention.wo": residual,
    }.items():
        assert found[f"{name}.weight"].std().item() == pytest.approx(std, rel=0.03), name
    experts = values(build(small(family="mixtral", init_std=0.05), generator=seeded()))
    down, up = (experts[f"layers.1.feed_forward.experts.{n}"] for n in ("down", "gate_up"))
    assert down.std().item() == pytest.approx(residual, rel=0.03)
    assert up.std().item() == pytest.approx(0.05, rel=0.03)
    assert bool((found["layers.0.ffn_norm.weight"] == 1).all())
    assert bool((found["norm.weight"] == 1).all())
    assert bool((found["layers.1.feed_forward.w2.bias"] == 0).all())


def test_a_parameter_without_memory_cannot_be_initialized() -> None:
    model = build(small(), device="meta")
    with pytest.raises(ValueError, match=r"norm\.weight is on the meta device"):
        model.initialize("norm.weight", model.norm.weight, seeded())


def test_wrappers_leave_no_trace_in_a_canonical_name() -> None:
    wrapped = "layers.3._checkpoint_wrapped_module._orig_mod.attention.wo.weight"
    assert canonical_name(wrapped) == "layers.3.attention.wo.weight"


@pytest.fixture(scope="module")
def model() -> CausalLM:
    # A large spread, so that the most likely token is not the same everywhere.
    return build(small(init_std=0.5), dtype=torch.float64, generator=seeded()).train()


def test_greedy_generation_takes_the_most_likely_token_of_a_full_forward(model: CausalLM) -> None:
    prompt = torch.tensor([[1, 2, 3], [7, 5, 7]])
    ids = generate(model, prompt, 12, temperature=0)
    assert torch.equal(ids[:, :3], prompt)
    assert torch.equal(ids[:, 3:], model(ids)[:, 2:-1].argmax(-1))
    assert len(ids[:, 3:].unique()) > 4
    assert torch.equal(generate(model, prompt[1], 12, temperature=0), ids[1])
    assert model.training


@pytest.mark.parametrize(
    "more",
    [
        {"kv_heads": 1}, {"family": "internlm2", "tie_embeddings": True},
        {"family": "deepseek", "kv_heads": None, "shared_size": 16},
    ],
)  # fmt: skip
def test_cached_forwards_give_the_logits_of_one_whole_forward(more: dict[str, Any]) -> None:
    model = build(small(init_std=0.5, **more), dtype=torch.float64, generator=seeded())
    ids = torch.randint(0, 40, (2, 23), generator=seeded(3))
    with torch.no_grad():
        wanted, found, start = model(ids), [], 0
        with cached(model):
            for size in (5, 1, 1, 9, 7):  # also several tokens that continue others
                found.append(model(ids[:, start : start + size], start=start))
                start += size
        torch.testing.assert_close(torch.cat(found, dim=1), wanted, rtol=0, atol=1e-10)
        torch.testing.assert_close(model(ids), wanted, rtol=0, atol=0)


def test_top_p_draws_among_the_tokens_that_hold_the_probability(model: CausalLM) -> None:
    prompt = torch.tensor([[4, 9]]).expand(800, 2)
    drawn = generate(model, prompt, 1, temperature=2.0, top_p=0.5, generator=seeded())[:, 2]
    chances, order = (model(prompt[:1])[0, -1] / 2.0).softmax(-1).sort(descending=True)
    count = int((chances.cumsum(-1) - chances < 0.5).sum())
    assert 1 < count < 20
    assert set(drawn.tolist()) == set(order[:count].tolist())
    first = generate(model, prompt[0], 4, top_p=1e-9, generator=seeded())
    assert torch.equal(first, generate(model, prompt[0], 4, temperature=0))


def test_sampling_is_deterministic_with_a_generator_and_differs_between_seeds(
    model: CausalLM,
) -> None:
    prompt = torch.tensor([1, 2, 3])
    first, second, other = (
        generate(model, prompt, 16, temperature=2.0, generator=seeded(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_sampling_draws_by_probability_at_the_given_temperature(model: CausalLM) -> None:
    prompt = torch.tensor([[4, 9]]).expand(4000, 2)
    drawn = generate(model, prompt, 1, temperature=1.5, generator=seeded())[:, 2]
    expected = (model(prompt[:1])[0, -1] / 1.5).softmax(-1)
    found = drawn.bincount(minlength=40) / 4000
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.03)


def test_top_k_draws_among_the_most_likely_only(model: CausalLM) -> None:
    prompt = torch.tensor([[4, 9]]).expand(500, 2)
    drawn = generate(model, prompt, 1, temperature=5.0, top_k=3, generator=seeded())[:, 2]
    assert set(drawn.tolist()) == set(model(prompt[:1])[0, -1].topk(3).indices.tolist())
    greedy = generate(model, prompt[0], 6, temperature=0)
    assert torch.equal(generate(model, prompt[0], 6, top_k=1, generator=seeded()), greedy)


def test_generation_stops_when_every_sequence_has_met_the_stop_token(model: CausalLM) -> None:
    prompt = torch.tensor([[1, 2, 3], [7, 5, 7]])
    free = generate(model, prompt, 12, temperature=0)
    stop = int(free[0, 5])
    stopped = generate(model, prompt[0], 12, temperature=0, stop_id=stop)
    first = free[0, 3:].tolist().index(stop)
    assert torch.equal(stopped, free[0, : 3 + first + 1])
    both = generate(model, prompt, 12, temperature=0, stop_id=stop)
    assert bool((both[0, 3 + first :] == stop).all())


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [([], {}, "at least one"), ([1], {"temperature": -1.0}, ">= 0"), ([1], {"top_k": 0}, ">= 1")],
)
def test_senseless_generation_is_an_error(
    model: CausalLM, prompt: list[int], options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, torch.tensor(prompt, dtype=torch.int64), 1, **options)

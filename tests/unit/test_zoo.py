"""The families by value: compared with a plain implementation, and with each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from internsp.config.model import ModelConfig
from internsp.errors import LayoutError
from internsp.model_zoo import CausalLM, build, llama_form, mixture_form
from internsp.sp import SequenceLayout

FP64 = torch.float64
SMALL = {"vocab_size": 31, "hidden_size": 24, "layers": 2, "heads": 4, "init_std": 0.3}
SHAPES = {
    "one key/value head for each head": {},
    "grouped, every bias": {"kv_heads": 2, "qkv_bias": True, "bias": True},
    "multi-query, own head_dim, tied": {"kv_heads": 1, "head_dim": 8, "tie_embeddings": True},
}


def config_of(family: str = "llama", **options: object) -> ModelConfig:
    return ModelConfig.model_validate({"family": family, **SMALL, **options})


def model_of(family: str = "llama", **options: object) -> CausalLM:
    """A model in fp64 in which nothing is 0 or 1 by chance of its initialization."""
    generator = torch.Generator().manual_seed(5)
    model = build(config_of(family, **options), dtype=FP64, generator=generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=FP64)
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(seed))


def plain_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_rotary(x: Tensor) -> Tensor:
    """``[s, d]``: channels i and i + d/2 are one complex number, turned by its angle."""
    half = x.shape[1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=FP64) / half)
    angle = torch.arange(x.shape[0], dtype=FP64)[:, None] * frequency
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angle)
    return torch.cat((turned.real, turned.imag), dim=1)


def plain_llama(config: ModelConfig, w: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Logits ``[s, vocabulary]`` of one sequence, head by head, without code of internsp."""
    dim = config.head_dim or config.hidden_size // config.heads
    share = config.heads // (config.kv_heads or config.heads)

    def linear(name: str, x: Tensor) -> Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    h = w["embed.weight"][ids]
    future = torch.ones(len(ids), len(ids)).triu(1).bool()
    for n in range(config.layers):
        x = plain_norm(h, w[f"layers.{n}.attention_norm.weight"])
        q, k, v = (linear(f"layers.{n}.attention.{p}", x).split(dim, 1) for p in ("wq", "wk", "wv"))
        seen = []
        for head in range(config.heads):
            scores = plain_rotary(q[head]) @ plain_rotary(k[head // share]).T / dim**0.5
            seen.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[head // share])
        h = h + linear(f"layers.{n}.attention.wo", torch.cat(seen, 1))
        x = plain_norm(h, w[f"layers.{n}.ffn_norm.weight"])
        gate, up = (
            linear(f"layers.{n}.feed_forward.w1", x),
            linear(f"layers.{n}.feed_forward.w3", x),
        )
        h = h + linear(f"layers.{n}.feed_forward.w2", gate * gate.sigmoid() * up)
    tied = w["embed.weight"] if config.tie_embeddings else w["head.weight"]
    return plain_norm(h, w["norm.weight"]) @ tied.T


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    picked = labels >= 0
    rows = logits[picked].log_softmax(-1)
    return -rows[torch.arange(len(rows)), labels[picked]].sum()


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_llama_equals_a_plain_implementation_in_logits_loss_and_every_gradient(
    options: dict[str, object],
) -> None:
    model = model_of(**options)
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    ids, labels = tokens(2, 11), tokens(2, 11, seed=1)
    labels[0, 3:6] = -100
    expected = torch.stack([plain_llama(model.config, weights, row) for row in ids])
    torch.testing.assert_close(model(ids), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(model(ids, last_only=True), expected[:, -1:], rtol=1e-11, atol=1e-11)

    total, count = model(ids, labels=labels, loss_chunk=4)
    assert int(count) == 19
    expected_total = plain_loss(expected, labels)
    torch.testing.assert_close(total, expected_total, rtol=1e-12, atol=1e-12)
    total.backward()
    expected_total.backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    wanted = {n: w.grad for n, w in weights.items()}
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def fuse(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Llama's weights in InternLM2's names and row order (also right for gradients)."""
    dim = config.head_dim or config.hidden_size // config.heads
    kv_heads = config.kv_heads or config.heads
    share = config.heads // kv_heads
    fused = {n: t for n, t in weights.items() if ".wk." not in n and ".wv." not in n}
    for name in [n for n in fused if ".wq." in n]:
        q, k, v = (weights[name.replace(".wq.", f".{p}.")].split(dim) for p in ("wq", "wk", "wv"))
        rows: list[Tensor] = []
        for group in range(kv_heads):
            rows += [*q[group * share : (group + 1) * share], k[group], v[group]]
        del fused[name]
        fused[name.replace(".wq.", ".wqkv.")] = torch.cat(rows)
    return fused


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_internlm2_equals_llama_with_the_same_weights_and_so_do_their_gradients(
    options: dict[str, object],
) -> None:
    llama, internlm2 = model_of(**options), model_of("internlm2", **options)
    internlm2.load_state_dict(fuse(llama.state_dict(), llama.config))
    ids, labels = tokens(2, 9), tokens(2, 9, seed=1)
    torch.testing.assert_close(internlm2(ids), llama(ids), rtol=1e-12, atol=1e-12)
    for model in (llama, internlm2):
        model(ids, labels=labels)[0].backward()
    gradients = {n: p.grad for n, p in llama.named_parameters() if p.grad is not None}
    expected = fuse(gradients, llama.config)
    found = {n: p.grad for n, p in internlm2.named_parameters()}
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


MIXTURES: dict[str, dict[str, object]] = {
    "mixtral": {"kv_heads": 2, "expert_size": 12, "experts": 4},
    "deepseek": {
        "experts": 4, "top_k": 3, "expert_size": 12, "shared_size": 10, "latent_size": 9,
        "rotary_size": 4, "head_dim": 6,
    },
}  # fmt: skip


def plain_experts(w: Mapping[str, Tensor], at: str, top_k: int, x: Tensor) -> Tensor:
    """``[s, hidden]``, one token and one expert after another; without code of internsp."""
    logits = x @ w[f"{at}.router.weight"].T
    scores = logits.sigmoid() if f"{at}.shared_experts.w1.weight" in w else logits.exp()
    rows = []
    for token, own in zip(x, scores, strict=True):
        best = own.detach().argsort(descending=True)[:top_k].tolist()
        made = token.new_zeros(token.shape)
        for expert in best:
            gate, up = (token @ w[f"{at}.experts.gate_up"][expert]).chunk(2)
            out = (gate * gate.sigmoid() * up) @ w[f"{at}.experts.down"][expert]
            made = made + own[expert] / own[best].sum() * out
        rows.append(made)
    return torch.stack(rows) + plain_swiglu(w, f"{at}.shared_experts", x)


def plain_swiglu(w: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    if f"{at}.w1.weight" not in w:
        return torch.zeros_like(x)
    gate, up = x @ w[f"{at}.w1.weight"].T, x @ w[f"{at}.w3.weight"].T
    return (gate * gate.sigmoid() * up) @ w[f"{at}.w2.weight"].T


def plain_mixture(config: ModelConfig, w: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Logits ``[s, vocabulary]`` of one sequence of a family with experts."""
    dim = config.head_dim or config.hidden_size // config.heads
    latent = config.latent_size or 4 * dim
    share = config.heads // (config.kv_heads or config.heads)
    turned = config.rotary_size or dim
    h = w["embed.weight"][ids]
    future = torch.ones(len(ids), len(ids)).triu(1).bool()
    for n in range(config.layers):
        at = f"layers.{n}.attention"
        x = plain_norm(h, w[f"layers.{n}.attention_norm.weight"])
        queries = (x @ w[f"{at}.wq.weight"].T).split(dim, 1)
        if config.family == "mixtral":
            keys, values = ((x @ w[f"{at}.{p}.weight"].T).split(dim, 1) for p in ("wk", "wv"))
        else:
            down = x @ w[f"{at}.wkv_down.weight"].T
            inner = plain_norm(down[:, :latent], w[f"{at}.latent_norm.weight"], 1e-6)
            heads = (inner @ w[f"{at}.wkv_up.weight"].T).split(2 * dim - turned, 1)
            keys = [torch.cat((e[:, : dim - turned], down[:, latent:]), 1) for e in heads]
            values = [e[:, dim - turned :] for e in heads]
        seen = []
        for head, query in enumerate(queries):
            q, k = (
                torch.cat((t[:, : dim - turned], plain_rotary(t[:, dim - turned :])), 1)
                for t in (query, keys[head // share])
            )
            scores = (q @ k.T / dim**0.5).masked_fill(future, -torch.inf)
            seen.append(scores.softmax(-1) @ values[head // share])
        h = h + torch.cat(seen, 1) @ w[f"{at}.wo.weight"].T
        x, at = plain_norm(h, w[f"layers.{n}.ffn_norm.weight"]), f"layers.{n}.feed_forward"
        dense = f"{at}.w1.weight" in w
        h = h + (plain_swiglu(w, at, x) if dense else plain_experts(w, at, config.top_k, x))
    return plain_norm(h, w["norm.weight"]) @ w["head.weight"].T


@pytest.mark.parametrize("family", list(MIXTURES))
def test_families_with_experts_equal_a_plain_implementation(family: str) -> None:
    model = model_of(family, **MIXTURES[family])
    assert all(not buffer.any() for buffer in model.buffers()), "biases and loads begin at 0"
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    ids, labels = tokens(2, 11), tokens(2, 11, seed=1)
    expected = torch.stack([plain_mixture(model.config, weights, row) for row in ids])
    torch.testing.assert_close(model(ids), expected, rtol=1e-11, atol=1e-11)
    model(ids, labels=labels)[0].backward()
    plain_loss(expected, labels).backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    wanted = {n: w.grad for n, w in weights.items()}
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    dense = [n for n in found if ".feed_forward.w1." in n]
    assert dense == (["layers.0.feed_forward.w1.weight"] if family == "deepseek" else [])


@pytest.mark.parametrize("family", ["llama", "internlm2", "deepseek"])
def test_packed_documents_equal_the_same_documents_run_one_by_one(family: str) -> None:
    model = model_of(family, **({"kv_heads": 2} if family != "deepseek" else {}))
    ids = tokens(2, 13)
    starts = [[0, 5, 6], [0, 9]]
    layout = SequenceLayout.create(ids, boundaries=starts)
    packed = model(layout.input_ids, layout=layout)
    total, count = model(layout.input_ids, layout=layout, labels=layout.labels)
    alone = torch.zeros((), dtype=FP64)
    for row, cuts in enumerate(starts):
        for start, stop in zip(cuts, [*cuts[1:], 13], strict=True):
            document = ids[row : row + 1, start:stop]
            logits = model(document)
            torch.testing.assert_close(packed[row, start:stop], logits[0], rtol=1e-11, atol=1e-11)
            alone = alone + plain_loss(logits[0, :-1], document[0, 1:])
    assert int(count) == 2 * 13 - 5  # the last token of each document predicts nothing
    torch.testing.assert_close(total, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_gives_the_same_gradients(reentrant: bool) -> None:
    model, ids = model_of(kv_heads=2), tokens(1, 10)
    layout = SequenceLayout.create(ids, boundaries=[[0, 4]])
    model(ids, layout=layout, labels=layout.labels)[0].backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    for block in model.layers:
        inner = block.forward
        block.forward = lambda *a, f=inner: checkpoint(f, *a, use_reentrant=reentrant)  # type: ignore[method-assign]
    model(ids, layout=layout, labels=layout.labels)[0].backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.thorough(3)
@pytest.mark.parametrize("family", ["llama", "internlm2"])
def test_compiled_blocks_give_the_same_loss_and_gradients_for_changing_documents(
    family: str,
) -> None:
    plain, compiled = model_of(family, kv_heads=2), model_of(family, kv_heads=2)
    ids = tokens(2, 10)
    for block in compiled.layers:
        block.compile(backend="aot_eager")
    for boundaries in ([[0, 4], [0]], [[0], [0, 3, 7]]):
        layout = SequenceLayout.create(ids, boundaries=boundaries)
        for model in (plain, compiled):
            model.zero_grad()
            model(ids, layout=layout, labels=layout.labels)[0].backward()
        expected = {n: p.grad for n, p in plain.named_parameters()}
        found = {n: p.grad for n, p in compiled.named_parameters()}
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_bf16_model_keeps_its_dtype_and_sums_its_loss_in_fp32() -> None:
    exact, rough = model_of(), model_of().to(torch.bfloat16)
    ids, labels = tokens(2, 9), tokens(2, 9, seed=1)
    assert rough(ids).dtype == torch.bfloat16
    total, _ = rough(ids, labels=labels)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), exact(ids, labels=labels)[0], rtol=0.05, atol=0)


def test_ids_of_another_shape_than_their_layout_are_an_error() -> None:
    layout = SequenceLayout.create(tokens(1, 8), rank=1, size=2)
    with pytest.raises(LayoutError, match=r"\(1, 8\).*\(1, 4\) \(rank 1 of 2\)"):
        model_of()(tokens(1, 8), layout=layout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 3}, "multiple of model.kv_heads = 3"),
        ({"heads": 5}, "set model.head_dim"),
        ({"family": "deepseek", "kv_heads": 2}, "has its own key"),
        ({"family": "deepseek", "rotary_size": 5}, "choose an even number, 2 to 6"),
        ({"family": "deepseek", "rotary_size": 8}, "choose an even number, 2 to 6"),
    ],
)
def test_heads_that_do_not_fit_are_an_error(options: dict[str, object], message: str) -> None:
    # model_copy does not validate, as a config made by a program might not.
    with pytest.raises(LayoutError, match=message):
        build(config_of().model_copy(update=options))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"family": "mixtral"}, ""),
        ({"family": "llama", "hidden_size": 30, "head_dim": 8}, "its 4 heads do not divide"),
        ({"family": "mixtral", "hidden_size": 30, "head_dim": 8}, "its 4 heads do not divide"),
        ({"family": "deepseek"}, ""),
        ({"family": "deepseek", "qkv_bias": True}, "its linear layers have biases"),
        ({"family": "deepseek", "shared_size": 0}, "its shared experts (0 features) are no"),
        ({"family": "deepseek", "expert_size": 24, "shared_size": 36}, "are no multiple of 24"),
    ],
)
def test_what_no_family_of_transformers_computes_is_named(
    changes: dict[str, Any], why: str
) -> None:
    config = ModelConfig.model_validate(changes)
    told = (llama_form if config.family == "llama" else mixture_form).why_not(config)
    assert why in told
    assert bool(why) == bool(told)

"""Attention on one rank, in fp64, against the formula written out."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from internsp.base.in_flight import Reporter
from internsp.base.trace import Trace
from internsp.errors import ConfigError, LayoutError, MissingDependencyError
from internsp.sp import AttentionMask, DistributedAttention, Documents, SequenceLayout, kernels
from internsp.sp.exchange import ExchangeGroup
from internsp.sp.hf.attention import _holds_token_tensor
from internsp.sp.ranges import MaskSpec
from internsp.sp.ring import Ring, _Transfers
from internsp.sp.routes import route
from internsp.sp.same_batch import _checksum


def written_out(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, starts: list[list[int]]
) -> Tensor:
    """Softmax attention with an explicit mask over the whole square."""
    batch, length, heads, depth = q.shape
    group = heads // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    at = torch.arange(length)
    rows = []
    for row in range(batch):
        document = torch.zeros(length, dtype=torch.long)
        for start in starts[row][1:]:
            document[start:] += 1
        seen = document[:, None] == document[None, :]
        distance = at[:, None] - at[None, :]
        if causal:
            seen &= distance >= 0
        if window is not None:
            seen &= distance.abs() < window
        scores = torch.einsum("qhd,khd->hqk", q[row], k[row]) / depth**0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, v[row]))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("starts", [[[0], [0]], [[0, 1, 6], [0, 4]]])
def test_attention_equals_the_formula_with_its_gradients(
    window: int | None, causal: bool, starts: list[list[int]]
) -> None:
    torch.manual_seed(0)
    shapes = [(2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)]
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    attend = DistributedAttention(4, 2, 8, causal=causal, window=window)
    layout = SequenceLayout.create(torch.zeros(2, 9, dtype=torch.long), boundaries=starts)
    mine = attend(*given, layout)
    theirs = written_out(*given, causal=causal, window=window, starts=starts)
    torch.testing.assert_close(mine, theirs, atol=1e-13, rtol=0)
    upstream = torch.randn_like(mine)
    for a, b in zip(
        torch.autograd.grad(mine, given, upstream),
        torch.autograd.grad(theirs, given, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=0)


def test_a_rank_whose_heads_read_key_value_heads_unevenly_is_right() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 5, 3, 4, dtype=torch.float64)
    k, v = torch.randn(2, 1, 5, 2, 4, dtype=torch.float64).unbind()
    out = kernels.SdpaKernel()(q, k, v, (0, 0, 1), AttentionMask(), 0.5)
    spread = [x.index_select(2, torch.tensor([0, 0, 1])) for x in (k, v)]
    wanted = written_out(q, *spread, causal=True, window=None, starts=[[0]])
    torch.testing.assert_close(out, wanted, atol=1e-13, rtol=0)


def _packed_reference(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, window: tuple[int, int]
) -> Tensor:
    """A mock of a variable-length kernel, for the adapters' tests."""
    causal = window[1] == 0
    rows = []
    for a, b in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        reach = None if window[0] == -1 else window[0] + 1
        parts = (x[a:b].double().unsqueeze(0) for x in (q, k, v))
        rows.append(written_out(*parts, causal=causal, window=reach, starts=[[0]])[0])
    return torch.cat(rows).to(q.dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("version", [2, 3, 4, "varlen", "varlen of torch 2.11"])
def test_variable_length_kernels_are_told_the_same_mask(
    monkeypatch: pytest.MonkeyPatch, version: int | str, window: int | None, causal: bool
) -> None:
    """The packages cannot run here; the adapters' calls are checked with a mock."""

    def flash(q: Tensor, k: Tensor, v: Tensor, **told: Any) -> Any:
        assert torch.equal(told["cu_seqlens_q"], told["cu_seqlens_k"])
        assert told["max_seqlen_q"] == told["max_seqlen_k"] == 6
        left, right = (-1 if side is None else side for side in told["window_size"])
        assert (told["window_size"][0] is None) == (version == 4 and window is None)
        assert told["softmax_scale"] == 0.5
        right = 0 if told["causal"] else right
        out = _packed_reference(q, k, v, told["cu_seqlens_q"], (left, right))
        return (out, None) if version == 4 else out

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any,
        scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        assert enable_gqa
        return older_varlen(q, k, v, cu_q, cu_k, *rest, scale=scale, window_size=window_size)

    def older_varlen(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any,
        scale: float, window_size: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        assert (*rest, scale) == (6, 6, 0.5)
        return _packed_reference(q, k, v, cu_q, window_size)

    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    module = types.ModuleType("stand_in")
    module.flash_attn_varlen_func = flash  # type: ignore[attr-defined]
    module.varlen_attn = varlen if version == "varlen" else older_varlen  # type: ignore[attr-defined]
    where = {
        2: "flash_attn",
        3: "flash_attn_interface",
        4: "flash_attn.cute",
    }
    monkeypatch.setitem(sys.modules, where.get(version, "torch.nn.attention.varlen"), module)
    if version == 4:
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    kernel = kernels.FlashKernel() if version in where else kernels.VarlenKernel()
    torch.manual_seed(0)
    q = torch.randn(2, 6, 4, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, 6, 2, 4, dtype=torch.float64).unbind()
    documents = Documents.create([[0, 2], [0]], 6)
    out = kernel(q, k, v, (0, 0, 1, 1), AttentionMask(causal, window, documents), 0.5)
    wanted = written_out(q, k, v, causal=causal, window=window, starts=[[0, 2], [0]])
    torch.testing.assert_close(out, wanted, atol=1e-13, rtol=0)


def test_a_missing_kernel_asked_for_by_name_gives_the_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match="pip install flash-attn"):
        DistributedAttention(4, 4, 8, kernel="flash")


def test_a_kernel_that_cannot_compute_this_says_why() -> None:
    attend = DistributedAttention(2, 2, 8, kernel="varlen")
    x = torch.zeros(1, 3, 2, 8)
    with pytest.raises(ConfigError, match="runs on CUDA, not on cpu"):
        attend(x, x, x)
    with pytest.raises(ConfigError, match="choose one of auto, flash, varlen, sdpa"):
        DistributedAttention(2, 2, 8, kernel="flesh")
    cuda = torch.device("cuda")
    refusal = kernels.FlashKernel().unsupported
    assert refusal(cuda, torch.bfloat16, 64) is None
    assert "float64" in str(refusal(cuda, torch.float64, 64))
    assert "head_dim" in str(refusal(cuda, torch.bfloat16, 257))


def test_auto_logs_its_choice_once(caplog: pytest.LogCaptureFixture) -> None:
    kernels._auto_kernel.cache_clear()
    x = torch.zeros(1, 3, 2, 8)
    with caplog.at_level(logging.INFO, "internsp.sp"):
        for _ in range(2):
            DistributedAttention(2, 2, 8)(x, x, x)
    assert [record.getMessage() for record in caplog.records] == [
        "attention on cpu in torch.float32 with head_dim 8: kernel 'sdpa' (auto)"
    ]


def test_shapes_and_layouts_that_do_not_fit_are_refused() -> None:
    attend = DistributedAttention(4, 2, 8)
    q, k = torch.zeros(2, 6, 4, 8), torch.zeros(2, 6, 2, 8)
    ids = torch.zeros(2, 6, dtype=torch.long)
    with pytest.raises(LayoutError, match=r"k of attention must be \[B, 6, 2, 8\]"):
        attend(q, q, k)
    with pytest.raises(LayoutError, match="rank 0 of 2"):
        attend(q[:, :3], k[:, :3], k[:, :3], SequenceLayout.create(ids, size=2))
    with pytest.raises(LayoutError, match="1 rows"):
        attend(q, k, k, SequenceLayout.create(ids[:1]))
    with pytest.raises(LayoutError, match="Packed kv"):
        attend.packed_kv(q, k)
    with pytest.raises(LayoutError, match="hides every key"):
        DistributedAttention(4, 2, 8, window=0)
    for wrong in ({"head_dim": 0}, {"head_dim": 4, "scale": float("nan")}):
        with pytest.raises(LayoutError, match="finite scale"):
            DistributedAttention(2, 1, **wrong)  # type: ignore[arg-type]


def test_a_masks_rule_that_holds_a_value_for_each_token_is_found_in_closures_and_tuples() -> None:
    """transformers joins rules by ``and_masks(*rules)``, whose closure holds a tuple."""

    def rule(held: Any) -> Any:
        return lambda *place: held if place else None

    documents, window = torch.zeros(2, 5), torch.tensor(4)
    for found in (documents, rule(documents), (rule(window), rule(documents)), (documents, 1)):
        assert _holds_token_tensor(rule(found))
    for nothing in (window, rule(window), (rule(window), rule(4)), None):
        assert not _holds_token_tensor(rule(nothing))


def test_a_checksum_differs_by_a_fraction_and_by_the_place_of_a_number() -> None:
    x = torch.tensor([[0.25, 0.5], [3.0, 4.0]])
    for other in (x + 0.125, x * 1.0000001, -x):
        assert _checksum(x) != _checksum(other)
    ids = torch.tensor([[5, 6, 7]])
    assert _checksum(ids) != _checksum(ids.flip(1))
    assert _checksum(x) == _checksum(x.t().contiguous().t())


def test_a_backend_may_return_one_handle_for_a_batch_of_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As NCCL does; gloo returns one for each message."""
    monkeypatch.setattr(dist, "P2POp", lambda *_, **__: None)
    fake: Any = types.SimpleNamespace(group_name="ring")
    group = ExchangeGroup(fake, None, 0, 2, Reporter())
    messages = [(True, torch.ones(1), 1, 5), (False, torch.ones(1), 1, 5)]
    for returned, wanted in ((["all"], ["all", "all"]), (["a", "b"], ["a", "b"])):
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda _, returned=returned: returned)
        assert group.batch_isend_irecv(messages) == wanted
    assert group.reporter.pairs == {"ring": 4}, "torch counts them, too"


def test_a_ring_frees_a_block_after_its_last_use_also_where_it_was_only_passed_on() -> None:
    """Causal and backwards: a block comes first to the ranks that do not see it."""
    held = tuple(((rank, rank + 1),) for rank in range(4))
    own, only_passed_on = torch.zeros(1, 1, 1, 1), 0
    for rank in range(4):
        group: Any = types.SimpleNamespace(
            trace=Trace(),
            reporter=Reporter(),
            batch_isend_irecv=lambda sent: [types.SimpleNamespace(wait=lambda: None) for _ in sent],
            next_tag=lambda: 1,
            keep=lambda tag, works: None,
        )
        spec = MaskSpec(True, None, ((4,),))
        ring = Ring(group, route(held, spec, rank, "reverse"), spec, (0,), 1.0)
        transfers = _Transfers(ring, own, own, False, "", "kv")
        for number, step in enumerate(ring.route.steps):
            transfers.step(number)
            later = ring.route.steps[number + 1 :]
            used = {each.block for each in later} | {s.block for each in later for s in each.sends}
            assert transfers.held.keys() <= used
            only_passed_on += not step.calls and bool(step.sends)
    assert only_passed_on == 3, "what is tried"

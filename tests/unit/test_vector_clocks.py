"""WP-4 on a fake accelerator: in three steps of each form every conflicting access is ordered."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from internsp import (
    ParallelMesh,
    WeightParallelConfig,
    ZeroOptimizer,
    clip_grad_norm_,
    model_zoo,
    parallelize,
    router_loss,
)
from internsp.config import ActivationCheckpointConfig
from internsp.config.model import ModelConfig
from internsp.failure.consensus import Consensus
from internsp.failure.objects import Objects
from internsp.optim.zero import step_together
from internsp.pipeline import Pipeline
from internsp.sp import SequenceLayout
from internsp.sp.same_batch import SameBatch
from tests.support.few import some
from tests.support.left_out import ROOT, Site, functions_called, left_out, sites
from tests.support.models import ALL, ROLLING, SOME, VOCABULARY, Tiny
from tests.support.pipeline import Case, batches, make
from tests.support.streams import Device, Stream, device
from tests.support.versions import since

FULL, HALF = {"mode": "full"}, {"mode": "full", "fraction": 0.5}
QUANTIZED = {"quantize": "int8", "coalesce_bytes": 0, "compute_dtype": "bfloat16"}
OFFLOAD = ("weights", "optimizer", "gradients")


class Trained:
    """A model with its optimizer, on streams of the program's choice."""

    def __init__(
        self, mesh: ParallelMesh, zero: bool = True, checkpoint: Any = None, freeze: bool = False,
        kind: Any = torch.optim.SGD, settings: Any = None, left_alone: bool = False, **config: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.model = Tiny(layers=3)
        for name, parameter in self.model.named_parameters() if freeze else ():
            parameter.requires_grad_(parameter.dim() > 1 and "norm" not in name)
        self.communicator = parallelize(
            self.model,
            mesh,
            WeightParallelConfig(**{"min_shard_elements": 1, **config}),
            activation_checkpoint=ActivationCheckpointConfig(**(checkpoint or {"mode": "none"})),
        )
        self.communicator.events.contents.left_alone = left_alone
        self.ids = torch.randint(VOCABULARY, (2, 3))
        if zero:
            self.optimizer: Any = ZeroOptimizer(
                self.communicator, kind, lr=0.1, max_grad_norm=1.0,
                **(settings or {"momentum": 0.9}),
            )  # fmt: skip
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self) -> torch.Tensor:
        return self.model(self.ids, labels=self.ids)

    def step(self) -> None:
        if not isinstance(self.optimizer, ZeroOptimizer) and self.communicator.state.link is None:
            group = self.communicator.mesh.stage_group
            clip_grad_norm_(self.model.parameters(), 1.0, group)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole_step(self, micro_batches: int = 1) -> None:
        for number in range(micro_batches):
            with self.communicator.replica_sync(number == micro_batches - 1):
                self.forward().backward()
        self.step()


def one(mesh: ParallelMesh, here: Device, **options: Any) -> None:
    made = Trained(mesh, **options)
    for _ in range(3):
        made.whole_step(2)


def two_models(mesh: ParallelMesh, here: Device, **options: Any) -> None:
    """Each on a stream of its own, which knows nothing of the other."""
    made = [Trained(mesh, **options) for _ in range(2)]
    streams = [Stream(), Stream()]
    for stream in streams:
        stream.wait_stream(here.here)
    for _ in range(3):
        for model, stream in zip(made, streams, strict=True):
            with stream:
                model.whole_step()
    for stream in streams:
        here.here.wait_stream(stream)


def two_passes(mesh: ParallelMesh, here: Device, **options: Any) -> None:
    """Two forwards and their backwards of one model, on two streams without an order."""
    made, streams = Trained(mesh, **options), [Stream(), Stream()]
    for _ in range(3):
        for stream in streams:
            stream.wait_stream(here.here)
        losses = []
        for stream in streams:
            with stream:
                losses.append(made.forward())
        for stream, loss in zip(streams, losses, strict=True):
            with stream:
                loss.backward()
        del losses, loss
        for stream in streams:
            here.here.wait_stream(stream)
        made.step()


def crossed_passes(mesh: ParallelMesh, here: Device, **options: Any) -> None:
    """Forwards and backwards of several micro-batches by turns on two streams without an order."""
    made, (a, b) = Trained(mesh, **options), (Stream(), Stream())
    a.wait_stream(here.here)
    b.wait_stream(here.here)
    calls = [(a, "forward"), (b, "forward"), (a, ""), (a, "forward"), (b, ""), (a, "")]
    for _ in range(3):
        losses: dict[Stream, torch.Tensor] = {}
        for stream, call in calls:
            with stream:
                if call:
                    losses[stream] = made.forward()
                else:
                    losses.pop(stream).backward()
        if not isinstance(made.optimizer, ZeroOptimizer):  # which is the program's to order
            b.wait_stream(a)
        with b:
            made.step()
        if not isinstance(made.optimizer, ZeroOptimizer):
            a.wait_stream(b)


def reads_between(mesh: ParallelMesh, here: Device, **options: Any) -> None:
    """Values and state are read on streams that know nothing of the step's."""
    made = Trained(mesh, **options)
    weight: Any = made.model.layers[0].q.weight  # type: ignore[union-attr]
    reads: list[Callable[[], Any]] = [
        lambda: weight.to_local().sum(), lambda: weight * 2, lambda: copy.deepcopy(weight),
        made.optimizer.state_dict,
    ]  # fmt: skip
    for _ in range(3):
        made.whole_step()
        for read in reads:
            with Stream() as other, torch.no_grad():
                state = read()
            here.here.wait_stream(other)
        made.optimizer.load_state_dict(state)


def within_unchanged(mesh: ParallelMesh, here: Device, **options: Any) -> None:
    """Two streams read what one of them has gathered."""
    made, (a, b) = Trained(mesh, **options), (Stream(), Stream())
    for stream in (a, b):
        stream.wait_stream(here.here)
    for _ in range(3):
        with made.communicator.unchanged():
            for stream in (a, b, a):
                with stream, torch.no_grad():
                    made.forward()
        with a:
            made.whole_step()
        b.wait_stream(a)


def a_pipeline(mesh: ParallelMesh, here: Device, fused: bool = False, **options: Any) -> None:
    """The first of two stages; the other one says as it does that it knows its tensors' shapes."""
    sizes = {"layers": 4, "micro_batches": 2, "length": 3, "chunks": 2}
    case = Case(weight=mesh.weight, **(sizes | options))
    with pytest.MonkeyPatch.context() as patch:
        votes = {"_warmup_backward_result": lambda *_, **__: torch.ones(1)}
        for name in votes.keys() & vars(PipelineStage).keys():  # from torch 2.13 on
            patch.setattr(PipelineStage, name, votes[name])
        patch.setattr(Objects, "gather", lambda _, mine: [mine] * mesh.pipeline)  # of names
        pipeline, _ = make(case, mesh=mesh)
        given = batches(case, mesh)
        chunks = pipeline.communicators
        optimizers = [ZeroOptimizer(c, torch.optim.SGD, lr=0.1, fused=fused) for c in chunks]
        for _ in range(3):
            pipeline.step(given)
            step_together(optimizers)
            for optimizer in optimizers:
                optimizer.zero_grad()


def of_the_zoo(mesh: ParallelMesh, here: Device, steps: int = 3, **config: Any) -> list[int]:
    """A sequence that is cut, or tokens that go to the owners of experts and back.

    Returns:
        Up to where the host stands behind the device, after each step.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "layers": 2, "heads": 2}
    model = model_zoo.build(ModelConfig(**sizes, intermediate_size=8, **config))
    parallelize(model, mesh, WeightParallelConfig(min_shard_elements=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cut = SequenceLayout.create(
        torch.randint(VOCABULARY, (1, 8)), rank=mesh.sequence_rank, size=mesh.sequence,
        ring=mesh.ring,
    )  # fmt: skip
    behind = []
    for _ in range(steps):
        loss = model(cut.input_ids, layout=cut, labels=cut.labels)[0]
        (loss + router_loss(model) if mesh.expert > 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        behind.append(here.host.clock.get(here.here, 0))
    return behind


FUSED = {"kind": torch.optim.AdamW, "settings": {"fused": True}}
NEAR, FAR, STAGES = {"weight": 2}, {"weight": 4}, {"weight": 2, "pipeline": 2}
FORMS: dict[str, tuple[Callable[..., None], dict[str, int], dict[str, Any]]] = {
    "crossed passes, near slices": (crossed_passes, FAR, {"near_ranks": 2, "checkpoint": FULL}),
    "crossed passes, rolling": (crossed_passes, NEAR, ROLLING | {"coalesce_bytes": 0}),
    "crossed passes, memory of each weight": (crossed_passes, NEAR, SOME | {"memory_pool": False}),
    "crossed passes, quantized": (crossed_passes, NEAR, QUANTIZED),
    "crossed passes, two levels": (crossed_passes, FAR, {"reduce": 2}),
    "crossed passes, sums of the backend": (crossed_passes, FAR, {"reduce": "backend"}),
    "crossed passes, a replicated head": (crossed_passes, NEAR, {"min_shard_elements": 70}),
    "crossed passes, plain loop": (crossed_passes, NEAR, {"zero": False}),
    "crossed passes, offload": (crossed_passes, NEAR, {"offload": OFFLOAD}),
    "offload": (one, NEAR, {"offload": OFFLOAD, "checkpoint": {"mode": "full", "offload": "all"}}),
    "offload, whole sums": (one, NEAR, {"offload": OFFLOAD, "accumulation": "full"}),
    "crossed passes, offload, left alone": (
        crossed_passes, NEAR, FUSED | {"offload": OFFLOAD, "left_alone": True}
    ),
    "offload, left alone": (
        one, NEAR, {
            "offload": OFFLOAD, "left_alone": True,
            "checkpoint": {"mode": "full", "offload": "all"},
        },
    ),
    "offload, plain loop": (one, NEAR, {"offload": ("weights", "gradients"), "zero": False}),
    "pipeline": (a_pipeline, STAGES, {"schedule": "Interleaved1F1B", "micro_batches": 4}),
    "pipeline with a split backward": (a_pipeline, STAGES, {"schedule": "InterleavedZeroBubble"}),
    "crossed passes, frozen norms": (crossed_passes, NEAR, {"freeze": True}),
    "crossed passes of three kinds of groups": (crossed_passes, {"weight": 2, "zero": 1}, {}),
    "crossed passes, whole matrices": (
        crossed_passes, NEAR, {"freeze": True, "kind": torch.optim.Muon}
    ),
    "offload in another dtype": (
        crossed_passes, NEAR, {"offload": ("weights",), "compute_dtype": "bfloat16"}
    ),
    "reads between steps": (reads_between, NEAR, {}),
    "passes within unchanged": (within_unchanged, NEAR, QUANTIZED),
    "passes within unchanged, coalesced": (within_unchanged, NEAR, ALL),
    "two models": (two_models, NEAR, {}),
    "crossed passes, a verdict on the device": (crossed_passes, NEAR, FUSED),
    "two passes": (two_passes, NEAR, {}),
    "two passes, coalesced": (two_passes, NEAR, SOME),
    "replicas": (one, NEAR, {}),
    "replicas, plain loop": (one, NEAR, {"zero": False}),
    "coalesced launches": (one, NEAR, ALL | {"checkpoint": HALF}),
    "by module": (one, NEAR, {"granularity": "module", "checkpoint": HALF}),
    "waits at once": (one, NEAR, {"overlap": False}),
    "quantized, near slices": (one, FAR, QUANTIZED | {"near_ranks": 2, "checkpoint": FULL}),
    "whole sums": (one, NEAR, {"accumulation": "full"}),
    "a sequence by heads": (of_the_zoo, {"weight": 2, "sequence": 2}, {}),
    "a ring": (of_the_zoo, {"weight": 2, "sequence": 2, "ring": 2}, {}),
    "owners of experts": (
        of_the_zoo, {"weight": 2, "expert": 2, "expert_weight": 1},
        {"family": "mixtral", "experts": 4, "top_k": 2, "auxiliary": 0.1},
    ),
}  # fmt: skip
"""What trains, its weight degree of four ranks, and options."""
if not since("2.12"):  # its stages speak otherwise
    FORMS = {name: form for name, form in FORMS.items() if form[0] is not a_pipeline}
if not since("2.13"):  # a fake group does not write what it sends
    FORMS = {name: form for name, form in FORMS.items() if form[0] is not of_the_zoo}


def run(form: str) -> Device:
    what, degrees, options = FORMS[form]
    with alone(4), device() as here:
        what(ParallelMesh.create(**degrees, device_type="cpu"), here, **options)
        return here


@contextmanager
def alone(ranks: int) -> Iterator[None]:
    """A process group of this process, which pretends to be rank 0 of ``ranks``."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Consensus, "gather", _all_say_the_same)
            yield
    finally:
        dist.destroy_process_group()


def _all_say_the_same(ranks: Consensus, topic: str, text: str, *_: Any) -> dict[int, str]:
    return dict.fromkeys(ranks._ranks, text)


@pytest.mark.parametrize("form", some([*FORMS], 12))
def test_every_conflicting_access_is_ordered(form: str) -> None:
    found = run(form)
    assert not found.races, "\n".join(found.races)
    assert found.accesses > 1000


# Before 2.13 a fake group does not write what it reduces: seldom finite, so that steps are skipped.
@pytest.mark.parametrize(
    ("waits", "options"),
    [
        pytest.param(False, FUSED, id="fused"),
        pytest.param(False, FUSED | {"offload": OFFLOAD, "left_alone": True}, id="offload"),
        pytest.param(
            True,
            FUSED | {"offload": OFFLOAD},
            id="offload, a program's own loop",
            marks=pytest.mark.thorough(1),
        ),
        pytest.param(True, {}, id="unfused", marks=pytest.mark.thorough(1)),
        pytest.param(False, {"zero": False}, id="plain loop"),
    ][0 if since("2.13") else 3 :],
)
def test_the_host_stands_behind_nothing_of_a_step_that_it_queues(
    waits: bool, options: dict[str, Any]
) -> None:
    """An unfused optimizer takes its verdict from the host, which therefore stands behind the norm
    of the same step; of a fused one's step the next one reads it. What is offloaded is waited for
    only where a program may use it. A plain loop with clipping reads nothing."""
    plain = not options.get("zero", True)
    with alone(4), device() as here:
        made = Trained(ParallelMesh.create(weight=2, device_type="cpu"), **options)
        main, ends = here.here, 0
        for step in range(4):
            begins = main.clock.get(main, 0)
            made.whole_step()
            behind = here.host.clock.get(main, 0)
            if plain:
                assert not step or behind == ends, "nothing was read"
            elif step > 1 and not waits:
                assert ends < behind <= begins, "the norm of the step before was read"
            if waits:
                assert behind > begins
            ends = behind
        assert not here.races
        if not plain:
            made.optimizer.grad_norm  # noqa: B018 - asked for: now the host waits
            assert here.host.clock.get(main, 0) > begins


@pytest.mark.skipif(not since("2.13"), reason="a fake group does not write what it reduces")
@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.thorough(2))])
def test_nor_does_it_in_a_pipeline_but_for_the_question_whether_all_ranks_can_run_the_step(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = list[int](), Pipeline._step_consensus
    with alone(4), device() as here:

        def noted(*args: Any) -> Any:
            found = ask(*args)
            asked.append(here.here.clock[here.here])
            return found

        monkeypatch.setattr(Pipeline, "_step_consensus", noted)
        mesh = ParallelMesh.create(**STAGES, device_type="cpu")
        a_pipeline(mesh, here, fused, schedule="Interleaved1F1B", micro_batches=4)
        assert (here.host.clock[here.here] <= asked[-1]) == fused


@pytest.mark.skipif(not since("2.13"), reason="a fake group does not write what it sends")
@pytest.mark.parametrize(
    ("form", "waits"),
    [
        pytest.param("a sequence by heads", False, marks=pytest.mark.thorough(1)),
        ("a ring", False),
        pytest.param("owners of experts", True, marks=pytest.mark.thorough(1)),
    ],
)
def test_the_host_waits_for_no_message_of_a_sequence_and_for_the_counts_of_experts(
    form: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SameBatch, "check", lambda *_: None)  # a device: the first three forwards
    _, degrees, config = FORMS[form]
    with alone(4), device() as here:
        mesh = ParallelMesh.create(**degrees, device_type="cpu")
        *_, before, last = of_the_zoo(mesh, here, steps=6, **config)
    assert (before < last) == waits


FILES = [
    *[ROOT / "base" / name for name in ("accelerator.py", "host.py")],
    *sorted((ROOT / "wp").glob("*.py")),
    *sorted((ROOT / "optim").glob("*.py")),
    *[ROOT / "modules" / "offload.py", ROOT / "pipeline" / "messages.py"],
    *[ROOT / "sp" / name for name in ("exchange.py", "ring.py", "same_batch.py")],
    *[ROOT / "experts" / name for name in ("exchange.py", "totals.py")],
]
SITES = sites(FILES)
ARGUED: dict[str, tuple[str, ...]] = {
    "no device: gloo in host memory": (
        "wp/collectives.py: WorkHandles.wait: wait",
        "wp/collectives.py: FlatGather.wait: wait",
    ),
    "a receive of the same group's stream comes later, and has been waited for": (
        "sp/ring.py: _Transfers.wait_sends: wait",
    ),
    "of times: the host's clock, and a stream for which no other one waits": (
        "base/accelerator.py: DeviceClock.restart: synchronize",
        "base/accelerator.py: DeviceClock.restart: synchronize 2",
        "base/accelerator.py: DeviceClock.seconds: synchronize",
        "base/accelerator.py: seconds_between: synchronize",
        "wp/collectives.py: Collectives._stamped: wait",
    ),
    "only earlier than the wait at the use (WP-12)": (
        "wp/collectives.py: Collectives.launch: wait",
        "optim/reduction.py: ZeroReducer._replicated_handle: wait",
    ),
    "the gather of the same bytes has taken the slot's turn, and the use has joined it": (
        "wp/encode.py: Encoder.decode: before_overwrite",
        "wp/slots.py: Slot._free: before_overwrite",
        "wp/communicator.py: ChunkWeights.pre_backward_of_function: _read_slot",
        "wp/near.py: NearSlices.save_slices: read",
    ),
    "a stream waits for all that another has queued: here it has done so for the embedding, which "
    "is read first; tests/ranks/test_streams.py orders less": (
        "wp/encode.py: Encoder.decode: written",
        "wp/slots.py: SlotStreams.written: filled_by",
        "wp/communicator.py: ISPCommunicator.unshard_all: _read_slot",
    ),
    "the first gather of a pass has waited: new values come on one group's stream, in order": (
        "wp/parameter.py: ReplicatedParameter.unshard: wait_until_ready",
    ),
    "each forward reads every parameter, and so waits for its new values, before the next step": (
        "optim/zero.py: step_together: wait_until_ready",
        "optim/zero.py: ZeroOptimizer._adopt: wait_until_ready",
        "optim/zero.py: ZeroOptimizer.load_state_dict: wait_until_ready",
        "optim/zero.py: ZeroOptimizer._switch: wait_until_ready",
        "wp/parameter.py: ModelParameter.load: wait_until_ready",
    ),
    "of what a program keeps of weights: here it keeps none (ranks/test_rules_writes.py does)": (
        "optim/bucket.py: Bucket.publish: wait 3",
    ),
    "what the reducer performs takes a turn (Chunk.perform), and the pool's buffers within it": (
        "wp/communicator.py: ChunkWeights._keep_gradients: take_turn",
        "wp/events.py: Events._gradients_complete: take_turn",
        "wp/reduce.py: Buffers.acquire: wait_stream",
    ),
    "a pass on several streams, on which autograd runs nodes as in forward: not in the fake": (
        "wp/reduce.py: GradientReducer._pop_ready: record_stream",
    ),
    "the host: one of these calls, or the wait for the last copy, comes before it writes": (
        "base/host.py: HostLink.synchronize: finish_copies_to_host",
        "base/host.py: HostLink.synchronize: synchronize",
        "wp/plain_loop.py: PlainLoop._finalize_gradients: synchronize",
    ),
    "copies of one direction are on one stream, in order": (
        "base/host.py: HostLink.copy_to_staging: wait",
        "wp/perform.py: Chunk._from_host: wait",
        "modules/offload.py: _free_host: wait",
    ),
    "each covers the other: copies to the host are waited for before those back": (
        "modules/offload.py: OffloadGroup.end_forward: finish_copies_to_host",
        "modules/offload.py: OffloadGroup._copy_back: finish_copies_to_host",
    ),
    "after a failure, or as a mesh or a gradient is thrown away: the host waits for the device": (
        "wp/communicator.py: ISPCommunicator.before_close: wait_until_ready",
        "wp/events.py: Events.reset: synchronize",
        "optim/reduction.py: ZeroReducer.discard: wait",
        "optim/reduction.py: ZeroReducer.drop_gradient: synchronize",
    ),
    "read by torch's functional collectives, which the fake does not see": (
        "optim/guarded.py: GuardedParameter.full_tensor: wait_until_ready",
        "optim/guarded.py: GuardedParameter.redistribute: wait_until_ready",
    ),
    "not in these forms: schedule-free optimizers, and a loss with a term of an offloaded "
    "parameter itself, to whose sum the host adds": (
        "optim/reduction.py: ZeroReducer._add_autograd_gradient: synchronize",
        "optim/zero.py: ZeroOptimizer._switch: synchronize",
    ),
}
"""Why it may be left out in all forms: what covers it, or why no stream is at stake."""


@functools.cache
def reached(form: str) -> set[tuple[str, str]]:
    """The functions of the library that a form calls."""
    with functions_called() as found:
        run(form)
    return found


def caught_by(site: Site) -> str:
    """The first form in which a race, or an error, shows that ``site`` is left out; else empty."""
    for form in FORMS:
        if site.among(reached(form)):
            with left_out(site):
                try:
                    if run(form).races:
                        return form
                except Exception as error:
                    return f"{form} ({type(error).__name__}: {error})"
    return ""


ALL_ARGUED = [each for why in ARGUED.values() for each in why]
SEEN = [site for site in SITES if str(site) not in ALL_ARGUED]
TOGETHER = {
    "offload": ARGUED["each covers the other: copies to the host are waited for before those back"],
    "offload, plain loop": (
        "wp/contents.py: Contents.hand_over: synchronize",
        "wp/plain_loop.py: PlainLoop._finalize_gradients: synchronize",
    ),
}
"""In a form: what is argued to cover each other. Left out together, it is seen."""
AT_ONCE = (
    "wp/collectives.py: Collectives.wait: wait", "wp/collectives.py: Collectives.wait: reached",
    "wp/slots.py: Slot.acquire: before_overwrite", "wp/collectives.py: Handle: keep",
)  # fmt: skip
"""Seen in one of the first forms; the others, which take longer to be seen, are thorough."""


@pytest.mark.parametrize(
    "site",
    [
        pytest.param(site, marks=() if str(site) in AT_ONCE else pytest.mark.thorough(10))
        for site in SEEN
    ],
    ids=str,
)
def test_a_wait_an_event_or_a_reference_that_is_left_out_is_a_race(site: Site) -> None:
    assert caught_by(site)


def test_what_is_argued_for_is_in_the_source() -> None:
    assert set(ALL_ARGUED) <= {str(site) for site in SITES}
    assert len(SEEN) > len(SITES) / 2


@pytest.mark.parametrize("form", TOGETHER)
def test_what_covers_each_other_is_a_race_where_all_of_it_is_left_out(form: str) -> None:
    named = {str(site): site for site in SITES}
    with ExitStack() as stack:
        for each in TOGETHER[form]:
            stack.enter_context(left_out(named[each]))
        assert run(form).races

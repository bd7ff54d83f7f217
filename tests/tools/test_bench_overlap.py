"""The overlap benchmark: its formulas by hand, its network's commands, its refusals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tools.bench.bounds import play, shares
from tools.bench.model import batch, elements, exchanged_bytes, full_batch, layout
from tools.bench.report import put
from tools.bench.rounds import Agreement, Spread, order
from tools.bench.signals import terminate_as_interrupt
from tools.overlap import campaign, report
from tools.overlap.campaign import exposures
from tools.overlap.fsdp import ChunkedAllGather, ChunkedReduceScatter, ranges_of
from tools.overlap.laws import (
    ideal_seconds,
    least_bytes,
    own_least_bytes,
    passes,
    rate_for,
    step_seconds,
)
from tools.overlap.network import Link, Namespaces, NetworkError, remove_stale, stale
from tools.overlap.options import TRIGGERS, Options, Spec

SECOND = 125_000  # bytes that take one second at 1 Mbit/s


def test_two_slots_save_two_of_three_l_passes() -> None:
    assert passes(8) == 3 - 2 / 8
    assert passes(1) == 2  # one block always stays in its slot
    assert least_bytes(800, layers=8, ranks=2) == pytest.approx(800 / 2 * 22 / 8)
    assert least_bytes(800, layers=8, ranks=4) == pytest.approx(800 * 3 / 4 * 22 / 8)


def test_each_family_has_the_bytes_of_its_own_memory_rule() -> None:
    sizes = (800, 2, 8)
    assert own_least_bytes("compute", (), *sizes) is None
    assert own_least_bytes("ddp", (), *sizes) == 800
    assert own_least_bytes("fsdp2", {"whole"}, *sizes) == 800
    assert own_least_bytes("fsdp2", {"chunked"}, *sizes) == 1200
    assert own_least_bytes("fsdp2", {"chunked", "last"}, *sizes) == 1150
    assert own_least_bytes("ours", (), *sizes) == 1100


def test_the_rate_makes_communication_the_wanted_multiple_of_compute() -> None:
    rate = rate_for(2.0, 10 * SECOND, compute_seconds=5.0)
    assert rate == pytest.approx(1.0)
    assert ideal_seconds(5.0, 10 * SECOND, rate) == pytest.approx(10.0)
    assert ideal_seconds(5.0, 10 * SECOND, 4.0) == pytest.approx(5.0)
    assert ideal_seconds(5.0, 10 * SECOND, None) == 5.0


USES = {(phase, w): s for phase, s in (("forward", 1.0), ("backward", 2.0)) for w in "ab"}


def line(kind: str, phase: str, weight: str, seconds: float = 0.0) -> tuple[str, str, str, int]:
    return kind, phase, weight, round(seconds * SECOND)


def test_a_played_schedule_hides_what_fits_and_shows_its_two_ends() -> None:
    forward = [
        line("AG", "forward", "a", 1.0),
        line("AG", "forward", "b", 1.0),
        line("WAIT", "forward", "a"),  # 0 .. 1: the first gather cannot be overlapped
        line("USE", "forward", "a"),  # 1 .. 2, while b arrives
        line("WAIT", "forward", "b"),
        line("USE", "forward", "b"),  # 2 .. 3
    ]
    backward = [
        line("USE", "backward", "b"),  # 3 .. 5
        line("RS", "backward", "b", 1.0),  # 5 .. 6
        line("USE", "backward", "a"),  # 5 .. 7
        line("RS", "backward", "a", 1.0),  # 7 .. 8: nor can the last reduction
        line("WAIT", "finish", "b"),
        line("WAIT", "finish", "a"),
    ]
    assert play([*forward, *backward], USES, 1.0) == pytest.approx(8.0)


def test_a_played_schedule_that_waits_at_once_hides_nothing() -> None:
    lines = [
        x
        for weight in "ab"
        for x in (
            line("AG", "forward", weight, 1.0),
            line("WAIT", "forward", weight),
            line("USE", "forward", weight),
        )
    ]
    assert play(lines, USES, 1.0) == pytest.approx(4.0)


def test_messages_queue_for_the_one_link_in_the_order_of_launch() -> None:
    lines = [
        line("RS", "backward", "b", 3.0),
        line("AG", "backward", "a", 1.0),  # behind the reduction: 3 .. 4
        line("WAIT", "backward", "a"),
        line("USE", "backward", "a"),
        line("WAIT", "finish", "b"),
    ]
    assert play(lines, USES, 1.0) == pytest.approx(6.0)


def test_compute_is_spread_over_uses_by_size() -> None:
    each = shares({"a": 1, "b": 3}, {"forward": 4.0, "backward": 8.0})
    assert each[("forward", "a")] == 1.0
    assert each[("backward", "b")] == 6.0
    assert sum(each.values()) == 12.0


def test_losses_agree_only_where_the_training_is_the_same() -> None:
    reference, refuses = [2.0, 1.9, 1.8, 1.7], Agreement().refuses
    assert refuses([2.0, 1.9005, 1.801], reference) is None
    averaged = [2.0, 1.95, 1.9]  # gradients divided by two ranks
    assert "fell by" in (refuses(averaged, reference) or "")
    assert "first loss" in (refuses([2.1, 2.0], reference) or "")
    assert refuses([float("nan")], reference) is not None
    assert refuses([2.0, float("nan")], reference) is not None
    assert "5 losses" in (refuses([2.0] * 5, reference) or "")


def test_where_little_is_lost_every_loss_counts_instead_of_the_decrease() -> None:
    agreement = Agreement(each=2e-3, seen=0.02)
    assert agreement.refuses([2.0, 1.997], [2.0, 1.999]) is None, "rounding"
    assert "step 1" in (agreement.refuses([2.0, 1.99], [2.0, 1.999]) or "")
    # The loss is close enough, its decrease is not: 0.107 instead of 0.1.
    assert "fell by" in (agreement.refuses([2.0035, 1.8965], [2.0, 1.9]) or "")


@pytest.mark.parametrize("count", [2, 3, 5])
def test_in_2n_rounds_every_variant_is_at_every_place_twice_and_drift_meets_all(count: int) -> None:
    names = "abcde"[:count]
    orders = [order(names, number) for number in range(2 * count)]
    for name in names:
        places = [each.index(name) for each in orders]
        assert sorted(places) == sorted([*range(count)] * 2)
        assert all(a + b == count - 1 for a, b in zip(places[::2], places[1::2], strict=True))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_stops_a_run_unwinds_the_stack(number: signal.Signals) -> None:
    stopping = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.getsignal(each) for each in stopping}
    try:
        terminate_as_interrupt()
        with pytest.raises(KeyboardInterrupt, match=number.name):
            signal.raise_signal(number)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_a_step_ends_when_its_last_rank_does() -> None:
    assert step_seconds([10.0, 11.0], [[12.0, 15.0], [13.0, 14.0]]) == [2.0, 2.0]
    spread = Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (spread.low, spread.median, spread.high) == (2.0, 3.0, 4.0)
    assert Spread.of([2.0, 1.0]) == Spread(1.5, 1.0, 2.0)


def test_waits_are_summed_by_block_and_phase() -> None:
    events = [
        ("WAIT", "layers.0", "w", "forward", 0.0, 1.0, 0),
        ("AG", "layers.0", "w", "forward", 0.0, 9.0, 5),
        ("WAIT", "layers.1", "w", "finish", 2.0, 5.0, 0),
        ("WAIT", "layers.0", "v", "forward", 1.0, 1.5, 0),
    ]
    assert exposures(events) == [("layers.1", "finish", 3.0), ("layers.0", "forward", 1.5)]


def test_a_preset_fills_what_flags_leave_open() -> None:
    options = Options(preset="heavy", layers=4).resolve()
    assert (options.ranks, options.ratio, options.layers) == (2, 2.8, 4)
    assert Options(preset="heavy", rate_mbit=600.0).resolve().ratio is None
    assert Options(preset="four").resolve().ranks == 4
    assert Options(variants=("ours",)).resolve().variants == ("compute", "ours")
    plain = json.loads(json.dumps(replace(options, json=Path("out")).to_json()))
    assert (plain["layers"], plain["variants"][0]) == (4, "compute")
    assert not set(plain) & {"json", "markdown", "mark", "picture"}, "outputs are no settings"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(ratio=1.0, rate_mbit=5.0), "exclude"),
        (Options(ranks=1), "at least 2"),
        (Options(heads=7), "multiple"),
        (Options(rounds=0), "--rounds"),
        (Options(variants=("theirs",)), "family"),
        (Options(variants=("fsdp2:faster",)), "forms"),
        (Options(variants=("ours:overlap",)), "KEY=VALUE"),
        (Options(variants=("ours@slow",)), "@free"),
        (Options(sequence_ranks=3), "not a multiple of --sequence-ranks"),
        (Options(sequence_ranks=2, variants=("ours", "ddp")), "ddp cannot shard a sequence"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_name(options: Options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        options.resolve()


def test_cut_sequences_compare_triggers_and_their_parts_make_up_the_whole() -> None:
    options = Options(preset="tiny", ranks=4, sequence_ranks=2).resolve()
    assert options.variants == TRIGGERS
    sizes = options.sizes()
    for data in range(2):
        whole = full_batch(sizes, data)
        parts = [batch(sizes, rank) for rank in (2 * data, 2 * data + 1)]
        for index in range(2):
            assert torch.equal(torch.cat([part[index] for part in parts], 1), whole[index])
    assert elements(sizes) == 2 * 16 * 96
    layouts = [layout(sizes, rank) for rank in range(4)]
    assert [int(made.positions[0, 0]) for made in layouts if made is not None] == [0, 8, 0, 8]
    assert layout(Options(preset="tiny").resolve().sizes(), 1) is None
    assert exchanged_bytes(sizes) == 3 * 8 * 8 * 96 * 2 / 2
    other: list[dict[str, Any]] = [{"losses": [9.0]}]
    assert campaign.check(Spec.parse("compute"), other, [1.0], 2) is None, (
        "it attends to its part only"
    )
    assert campaign.check(Spec.parse("compute"), other, [1.0], 1) is not None
    assert campaign.check(Spec.parse("ours"), other, [1.0], 2) is not None


def test_a_variant_name_is_read() -> None:
    spec = Spec.parse("ours:prefetch_depth=2,overlap=false,gather_before=qkv@free")
    assert spec.arguments == {"prefetch_depth": 2, "overlap": False, "gather_before": "qkv"}
    assert spec.free
    assert Spec.parse("fsdp2:chunked+last").forms == {"chunked", "last"}


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 1000])
def test_chunks_cover_everything_once(numel: int) -> None:
    ranges = ranges_of(numel)
    assert len(ranges) == min(numel, 8)
    assert [i for a, b in ranges for i in range(a, b)] == list(range(numel))


class FakeRanks:
    """Every rank of a group in this process, each with the same tensors."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, out: list[torch.Tensor], piece: torch.Tensor, **_: Any) -> Any:
        for row in out:
            row.copy_(piece)
        return SimpleNamespace(wait=lambda: None)

    def exchange(self, out: torch.Tensor, pieces: torch.Tensor, **_: Any) -> Any:
        out.view(self.size, -1).copy_(pieces.view(self.size, -1)[:1].expand(self.size, -1))
        return SimpleNamespace(wait=lambda: None)


def test_chunked_collectives_of_fsdp_keep_every_element_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake: Any = FakeRanks(2)
    group: Any = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather", fake.gather)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", fake.exchange)
    shard = torch.arange(19.0)
    whole = torch.empty(38)
    assert ChunkedAllGather()(whole, shard, group) is None
    assert torch.equal(whole, shard.repeat(2))
    reduction, outputs = ChunkedReduceScatter(), [torch.zeros(19) for _ in range(3)]
    for factor, output in enumerate(outputs, start=1):
        reduction(output, factor * torch.arange(38.0), group, None)
    assert torch.equal(outputs[0], 2 * shard)  # the oldest was finished for the third
    assert not outputs[2].any()
    reduction.finish_reductions()
    assert torch.equal(outputs[2], 6 * shard)


class Recorder:
    """A mock of iproute2: records commands, knows which namespaces exist, may fail at one."""

    def __init__(self, fail: str = "") -> None:
        self.commands: list[str] = []
        self.names: list[str] = []
        self.fail = fail

    def __call__(self, command: Sequence[str]) -> str:
        text = " ".join(command)
        self.commands.append(text)
        if self.fail and self.fail in text:
            raise NetworkError(text)
        if text.startswith("ip netns add"):
            self.names.append(command[-1])
        elif text.startswith("ip netns del"):
            self.names.remove(command[-1])
        elif "tcp_congestion_control" in text:
            return "reno\n"
        return "\n".join(f"{name} (id: 0)" for name in self.names)


@pytest.mark.parametrize("ranks", [2, 4])
def test_namespaces_carry_the_process_id_and_are_all_removed(ranks: int) -> None:
    run = Recorder()
    run.names.append("other")
    with Namespaces(ranks, run=run, owner=77) as network:
        assert len(run.names) == 1 + ranks + (ranks > 2)
        assert all(n == "other" or n.startswith("ispbench77") for n in run.names)
        network.limit(600.0)
        network.limit(600.0)
        network.limit(None)
        assert network.label.endswith("tbf, tcp reno"), "what is in force inside is told"
    assert run.names == ["other"]
    limits = [c for c in run.commands if " tbf " in c]
    assert len(limits) == ranks
    assert "tc -n ispbench77r0 qdisc replace dev ispeth root tbf rate 600000kbit" in limits[0]
    assert sum("qdisc del" in c for c in run.commands) == ranks
    # Nothing is ever created outside a namespace.
    assert all(" netns " in c for c in run.commands if c.startswith("ip link add"))


def test_what_a_connection_sends_ahead_is_limited_in_every_namespace_and_told() -> None:
    run = Recorder()
    with Namespaces(2, send_buffer_kib=256, run=run, owner=77) as network:
        assert "at most 256 KiB sent ahead by a connection" in network.label
    limits = [command for command in run.commands if "tcp_wmem" in command]
    assert [command.split()[3] for command in limits] == ["ispbench77r0", "ispbench77r1"]
    assert all("echo 4096 16384 262144 >" in command for command in limits)
    run.commands.clear()
    with Namespaces(2, run=run, owner=77) as network:
        assert "sent ahead" not in network.label
    assert not any("tcp_wmem" in command for command in run.commands), "as the host has it"


def test_a_network_that_breaks_half_way_is_removed() -> None:
    run = Recorder(fail="link add")
    with pytest.raises(NetworkError), Namespaces(2, run=run, owner=77):
        pass
    assert run.names == []


def test_only_namespaces_of_dead_runs_of_the_benchmark_are_stale() -> None:
    names = ["ispbench12r0", "ispbench13hub", "ispbench14r3", "docker1", "ispbench12r0x"]
    assert stale(names, lambda pid: pid == 14) == ["ispbench12r0", "ispbench13hub"]
    run = Recorder()
    alive = f"ispbench{os.getpid()}r0"
    run.names = ["ispbench999999999r0", alive, "mine"]
    assert remove_stale(run) == ["ispbench999999999r0"]
    assert run.names == [alive, "mine"]


def test_figures_go_between_the_marks_of_their_preset(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- overlap:even -->\nold\n<!-- /overlap:even -->\nb\n")
    put(page, "overlap:even", "new\n")
    put(page, "overlap:even", "newer\n")
    assert page.read_text() == "a\n<!-- overlap:even -->\nnewer\n<!-- /overlap:even -->\nb\n"
    put(tmp_path / "deep" / "alone.md", "overlap:even", "new\n")
    alone = tmp_path / "deep" / "alone.md"
    assert alone.read_text() == "new\n"
    for body in ("new\n", "newer\n"):
        put(alone, "overlap:even", body)
        marked = f"<!-- overlap:even -->\n{body}<!-- /overlap:even -->\n"
        assert alone.read_text() == f"new\n\n{marked}", "nothing of a page without marks is lost"


class FakeSession:
    """Replies like two ranks; each variant has the given times and losses."""

    def __init__(self, told: dict[str, tuple[float, list[float]]]) -> None:
        self.told = told

    def ask(self, call: str, **request: Any) -> list[Any]:
        if call == "hello":
            numels = {"layers.0.w": 4, "layers.1.w": 4}
            return [{"torch": "2", "reasons": {}, "numels": numels, "itemsize": 2}] * 2
        if call == "reference":
            return [[2.0, 1.9, 1.8, 1.7], []]
        seconds, losses = self.told[request["variant"]]
        steps = range(1, request["steps"] + 1)
        answer = {"start": 0.0, "ends": [seconds * i for i in steps], "losses": losses}
        answer |= {"phases": {}, "waited": 0.0, "other_cpu": 0.0, "sent": None, "peak_bytes": 1}
        return [answer, answer | {"losses": [0.0] * len(losses)}]


def test_a_variant_that_trains_something_else_gets_no_time() -> None:
    told = {
        "compute": (0.5, [2.0, 9.0, 9.0]),  # without exchange only its first loss can agree
        "ddp": (1.0, [2.0, 1.9, 1.8]),
        "fsdp2": (0.1, [2.0, 1.95, 1.9]),
    }
    options = Options(preset="tiny", layers=2, variants=("compute", "ddp", "fsdp2")).resolve()
    session: Any = FakeSession(told)
    heard: list[str] = []
    outcome = campaign.run(options, Link(), session, heard.append)
    summary = campaign.summarize(outcome)
    assert set(summary["variants"]) == {"compute", "ddp"}
    assert summary["variants"]["ddp"]["over_ideal"] == pytest.approx(2.0)
    assert summary["least_bytes"] == 16  # 16 bytes of weights, 2 ranks, 2 passes of 2 blocks
    assert "trains something else" in summary["failed"]["fsdp2"]
    assert sum("FSDP2: the loss fell by" in line for line in heard) == 1  # and is not run again
    assert "FSDP2" not in "".join(cell for row in report.table(summary) for cell in row)


@pytest.mark.parametrize(
    ("most", "found"),
    [
        (None, "AVX512_CORE_AMX"), ("AVX512_CORE_BF16", "AVX512_CORE_BF16"),
        ("AVX512_CORE", "AVX512_CORE"), ("SSE41", "AVX512_CORE_AMX"),
    ],
)  # fmt: skip
def test_it_tells_what_bf16_products_are_made_with(most: str | None, found: str) -> None:
    flags = ["avx2", "avx512bw", "avx512_bf16", "amx_bf16"]
    assert campaign.products_of(flags, most) == found
    assert campaign.products_of(flags[:1], most) in ("AVX2", "no wide instructions")
    assert campaign.products_of([], most) == "no wide instructions"


def test_without_namespaces_it_says_so_and_offers_loopback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools import bench_overlap

    monkeypatch.setattr(bench_overlap, "missing", lambda: "network namespaces need root")
    monkeypatch.setattr(bench_overlap, "terminate_as_interrupt", lambda: None)
    assert bench_overlap.main(["--preset", "tiny"]) == 2
    said = capsys.readouterr().err
    assert "need root" in said
    assert "--network loopback" in said

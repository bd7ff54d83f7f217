"""``tools/bench/ranks.py``: ranks reply, refuse, fail alone or die; the parent names the rank."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import start_server
from tools.bench.ranks import RankError, Refused, Session, Setup


class Worker:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def total(self) -> tuple[int, str, float]:
        mine = torch.tensor(self.factor * (1.0 + dist.get_rank()))
        dist.all_reduce(mine)
        return dist.get_rank(), os.environ["LOCAL_RANK"], mine.item()

    def fail(self, ranks: list[int]) -> None:
        if dist.get_rank() in ranks:
            raise ValueError("on purpose")

    def end(self, rank: int) -> None:
        if dist.get_rank() == rank:
            print("last words", flush=True)
            os._exit(7)


@pytest.mark.ranks
def test_answers_come_by_rank_and_a_failure_says_whose_it_is() -> None:
    start_server()
    with Session(Setup(f"{__name__}:Worker", (10,), 2, timeout=60.0)) as session:
        assert session.ask("total") == [(0, "0", 30.0), (1, "1", 30.0)]
        with pytest.raises(Refused, match="every rank failed at fail") as refused:
            session.ask("fail", ranks=[0, 1])
        assert refused.value.reason == "ValueError: on purpose"
        assert "raise ValueError" in refused.value.trace
        assert session.ask("total")[0] == (0, "0", 30.0), "a refused request loses nothing else"
        with pytest.raises(RankError, match="rank 1 failed alone at fail"):
            session.ask("fail", ranks=[1])
        processes = [rank.process for rank in session._ranks]
        with pytest.raises(RankError, match="rank 1 ended with status 7") as lost:
            session.ask("end", rank=1)
        assert "last words" in str(lost.value)
    assert not any(process.is_alive() for process in processes)

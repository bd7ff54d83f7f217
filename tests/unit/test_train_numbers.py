"""Spikes and early stop, from numbers alone."""

from __future__ import annotations

import math

from internsp.app.train.numbers import EarlyStop, Spikes
from tests.ranks.test_train import config
from tests.support.metrics import step


def test_a_spike_is_told_from_the_median_of_the_steps_before() -> None:
    spikes = Spikes(config())
    said = [spikes.check(step(n, 2.0 + n % 3 / 10)) for n in range(1, 21)]
    assert not any(said)
    assert spikes.check(step(21, 4.1)) == ""
    found = spikes.check(step(22, 8.4))
    assert found == "step 22: the loss is 8.4, 4.0 times the median of the 21 steps before"
    assert spikes.check(step(23, math.nan)) == ""
    assert spikes.check(step(24, 2.1, grad_norm=1e9)).startswith(
        "step 24: the gradient norm is 1e+09"
    )


def test_nothing_is_told_of_the_first_steps_or_where_it_is_off() -> None:
    early = Spikes(config())
    assert not any(early.check(step(n, 10.0**n)) for n in range(1, 11))
    off = Spikes(config(train={"loss_spike": 0.0, "norm_spike": 0.0}))
    assert not any(off.check(step(n, 10.0**n)) for n in range(1, 30))


def test_early_stop_counts_evaluations_without_a_lower_loss() -> None:
    stop = EarlyStop(config(train={"early_stop": 2, "eval_every": 1}))
    losses = [3.0, None, 2.0, 2.5, 1.9, 1.9, None]
    assert not any(stop.reached(loss) for loss in losses)
    assert stop.reached(math.nan)
    off = EarlyStop(config())
    assert not any(off.reached(1.0) for _ in range(20))

"""FLOPs per token: the formula compared with torch's own count, and figures of devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from internsp import model_zoo
from internsp.app.config import Config
from internsp.app.report.metrics import flops_per_token, peak_tflops

LENGTH = 24


def settings(**sections: dict[str, Any]) -> Config:
    model = {"hidden_size": 32, "layers": 3, "heads": 4, "kv_heads": 2, "vocab_size": 300}
    given = {"model": model, "data": {"sequence_length": LENGTH}}
    return Config.model_validate({n: {**given.get(n, {}), **sections.get(n, {})}
                                  for n in {**given, **sections}})  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_is_what_torch_counts_of_a_step(tied: bool) -> None:
    config = settings(model={"hidden_size": 32, "tie_embeddings": tied})
    model = model_zoo.build(config.model)
    ids = torch.randint(0, 300, (1, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    matrices = sum(p.numel() for p in model.parameters())
    counted = counter.get_total_flops() / LENGTH
    # Norms' weights, which multiply no matrix, are in the formula; torch counts attention's
    # backward as 2.5 forwards where the formula has 2.
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    attention = 4 * 3 * 32 * LENGTH
    said = flops_per_token(config, matrices) - 6 * norms
    assert said - 3 * attention == pytest.approx(counted - _attention(counter) / LENGTH, rel=1e-9)


def _attention(counter: FlopCounterMode) -> int:
    own = counter.get_flop_counts()["Global"]
    return sum(n for op, n in own.items() if "attention" in str(op))


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989.4), ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA L40S", 362.0), ("NVIDIA L4", 121.0),
        ("Some L400", None), ("", None),
    ],
)  # fmt: skip
def test_a_peak_is_that_of_the_device_in_16_bits_or_the_one_that_is_given(
    device: str, peak: float | None
) -> None:
    assert peak_tflops(settings(train={"dtype": "bfloat16"}), device) == peak
    assert peak_tflops(settings(), device) is None
    assert peak_tflops(settings(train={"peak_tflops": 2.5}), device) == 2.5

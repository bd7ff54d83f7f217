"""The sum of a weight's reductions: autograd's tensor is copied once, when it is written to."""

from __future__ import annotations

import torch

from internsp.wp.reduced import ReducedGradient


def test_a_borrowed_gradient_is_copied_once_and_stays_as_it_was() -> None:
    given = torch.full((4,), 1.5, dtype=torch.bfloat16)
    found = ReducedGradient((2, 2), None)
    found.borrow(given)
    assert found.total is not None
    assert found.total.data_ptr() == given.data_ptr()
    own = found.own()
    assert own.dtype == torch.float32
    own.add_(1)
    assert found.own() is own, "it is in memory of its own already"
    found.add(torch.ones(2, 2))
    found.borrow(given)
    assert found.total.equal(torch.full((2, 2), 5.0))
    assert given.equal(torch.full((4,), 1.5, dtype=torch.bfloat16))
    taken, before = found.pop(), found.total
    assert taken is not None
    assert taken.equal(torch.full((2, 2), 5.0))
    assert before is None, "a later gradient is a new sum"

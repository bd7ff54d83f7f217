"""A few of the families of transformers that ``python -m tests.families`` compares."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.families.options import Setting
from tests.support.ranks import ranks

# A dense one; a convolution's weight and a recurrence; experts as 3-D parameters; transposed
# weights, and a tied head.
FAMILIES = {
    "llama": Setting(2, 1, "half", False),
    "mamba2": Setting(2, 1, "own", False),
    "mixtral": Setting(2, 1, "reentrant", True),
    "gpt2": Setting(2, 1, "own-reentrant", True),
}


@pytest.mark.slow(5)
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@ranks(2, timeout=300)
def test_families_of_transformers_train_as_on_one_process() -> None:
    from tests.families.rank import Comparison  # takes seconds: in the ranks only

    comparison = Comparison()
    for family, setting in FAMILIES.items():
        for kind, (apart, where) in comparison.compare(family, setting, widened=True).items():
            assert apart <= 1e-10, f"{family}, {setting}: {kind} {where} differs by {apart}"

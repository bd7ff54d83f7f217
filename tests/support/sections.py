"""The options of a case, by the section that has each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from internsp.config import SequenceConfig, WeightParallelConfig


def sections(options: Mapping[str, Any]) -> tuple[WeightParallelConfig, SequenceConfig]:
    """The two sections of ``options``, which are keys of one or the other."""
    own = options.keys() & SequenceConfig.model_fields.keys()
    weights = {key: options[key] for key in options.keys() - own}
    return WeightParallelConfig(**weights), SequenceConfig(**{key: options[key] for key in own})

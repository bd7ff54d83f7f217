"""Sections of a configuration, of options that a case gives together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from internsp.config import SequenceConfig, WeightParallelConfig


def sections(options: Mapping[str, Any]) -> tuple[WeightParallelConfig, SequenceConfig]:
    """The two sections of ``options``, which are keys of one or the other."""
    own = options.keys() & SequenceConfig.model_fields.keys()
    weights = {key: options[key] for key in options.keys() - own}
    return WeightParallelConfig(**weights), SequenceConfig(**{key: options[key] for key in own})


_OF_SEQUENCES = ("ring", "fast_links", "balance")


def mesh_sections(**degrees: Any) -> dict[str, dict[str, Any]]:
    """Degrees of a mesh by section: those of the ranks of a sequence, and all others."""
    own = {key: degrees.pop(key) for key in _OF_SEQUENCES if key in degrees}
    return {"parallel": degrees, "sequence": own} if own else {"parallel": degrees}

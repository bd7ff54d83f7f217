"""What a communicator of the user's own can do."""

from __future__ import annotations

from collections.abc import Sequence

from internsp.errors import ConfigError
from internsp.structure.assign import ParameterSharding


def require_own_serves(shardings: Sequence[ParameterSharding]) -> None:
    """Refuse what a communicator of the user's own cannot do for a weight."""
    for sharding in shardings:
        options = sharding.options
        if sharding.unit is None:
            continue
        if options.offload:
            raise ConfigError(
                f"weight_parallel.offload of {sharding.name}: a communicator of your own reads "
                "shards on the device; offload nothing, or take the library's communicator"
            )
        if options.custom_gather is not None or options.quantize != "none":
            raise ConfigError(
                f"weight_parallel.quantize (or a rule's functions) of {sharding.name}: a "
                "communicator of your own decides what travels; quantize nothing, or take the "
                "library's communicator"
            )

"""The configuration of a run: its sections, reading them from a file, and checks across them."""

from internsp.app.config.checks import HELD_OUT
from internsp.app.config.load import Config, load_config, read_config, sections
from internsp.app.config.sections import (
    DataConfig,
    DocumentsConfig,
    TrainConfig,
)

__all__ = [
    "HELD_OUT",
    "Config",
    "DataConfig",
    "DocumentsConfig",
    "TrainConfig",
    "read_config",
    "load_config",
    "sections",
]

"""Models to train, one file for each family, each readable as single-device code.

Installed as ``internsp.model_zoo``. In a checkout the folder is next to ``internsp``, which links
to it. There ``model_zoo`` is a second name of the same modules, not of copies.
"""

from __future__ import annotations

import importlib
import sys

from internsp.model_zoo.common import CausalLM, canonical_name
from internsp.model_zoo.deepseek import DeepSeek
from internsp.model_zoo.families import FAMILIES, build, materialize
from internsp.model_zoo.generate import generate, stream
from internsp.model_zoo.internlm2 import InternLM2
from internsp.model_zoo.llama import Llama
from internsp.model_zoo.mixtral import Mixtral

__all__ = [
    "FAMILIES",
    "CausalLM",
    "DeepSeek",
    "InternLM2",
    "Llama",
    "Mixtral",
    "build",
    "canonical_name",
    "generate",
    "materialize",
    "stream",
]

if __name__ == "model_zoo":  # imported by the second name, see the docstring
    for _part in (
        "", ".common", ".deepseek", ".families", ".generate", ".internlm2", ".llama", ".llama_form",
        ".mixtral", ".mixture_form",
    ):  # fmt: skip
        sys.modules[__name__ + _part] = importlib.import_module("internsp.model_zoo" + _part)

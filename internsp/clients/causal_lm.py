"""A causal model of ``transformers`` as ``internsp train`` calls a model (extra ``[hf]``)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from internsp.clients.chunked_head import LOSS, ChunkedHead
from internsp.errors import ConfigError, MissingDependencyError, StructureError
from internsp.load import stored_shapes
from internsp.sp import IGNORE_INDEX, SequenceLayout, token_loss

_LOG = logging.getLogger(__name__)
_PROBE = 4  # tokens of each of two documents


class HFCausalLM(nn.Module):
    """The model itself is ``model``, unmodified; its parameters' names begin so.

    Auxiliary losses that a model adds to its own loss (a mixture's router) are left out.

    Args:
        folder: with ``config.json``; its weights (``*.safetensors``) are read on ``"cpu"``. Where
            there are none the model's own initialization is used, from ``seed``, the same on every
            rank and mesh.
        device: ``"cpu"`` holds the whole model with its values, ``"meta"`` its shapes alone.
        weights: whether the model is to have those of the folder. They are left to
            :func:`internsp.load_weights` (:attr:`unread`) where the folder has every parameter
            under its own name, in its own shape; else they are read whole here.

    Attributes:
        unread: the folder from which the model, on the meta device, is to be loaded; or None.

    Raises:
        ConfigError: transformers cannot make a causal model of the folder.
        MissingDependencyError: transformers is not installed.
    """

    def __init__(
        self, folder: str, dtype: torch.dtype, seed: int, device: str = "cpu", weights: bool = True
    ) -> None:
        super().__init__()
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise MissingDependencyError(
                f"model.family = \"hf\" needs transformers ({error}): pip install 'internsp[hf]'"
            ) from error
        path = Path(folder)
        saved = weights and device != "meta" and any(path.glob("*.safetensors"))
        self.unread: Path | None = None
        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)

            def build(device: str) -> Any:
                with torch.random.fork_rng(devices=[]), torch.device(device):
                    torch.manual_seed(seed)
                    return AutoModelForCausalLM.from_config(config, dtype=dtype)

            if saved:
                self.model = build("meta")
                why = _not_streamed(self.model, path, dtype)
                if why:
                    _LOG.warning("every process reads the whole model: %s", why)
                    self.model = AutoModelForCausalLM.from_pretrained(
                        path, config=config, dtype=dtype, use_safetensors=True,
                        local_files_only=True,
                    )  # fmt: skip
                else:
                    self.unread = path
            else:
                self.model = build(device)
        except (ValueError, OSError, KeyError) as error:
            raise ConfigError(f"model.path: transformers cannot load {folder}: {error}") from error
        self.model.train()
        self._head = ChunkedHead.of(self.model)
        self._takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters

    def forward(
        self, input_ids: Tensor, *, layout: SequenceLayout, labels: Tensor, loss_chunk: int = 1024
    ) -> tuple[Tensor, Tensor]:
        """The summed token loss of this rank's positions and its count, as the zoo's models.

        The logits exist chunk by chunk, where the class's head can be run so; else whole.
        """
        # Under a sequence degree the model cuts its inputs itself (`internsp.hf`); its logits are
        # this rank's in training, and all in evaluation.
        dealt = {"layout": layout} if layout.size > 1 else {}
        given = self._given(layout.all_ids, layout.all_positions, **dealt)
        options: dict[str, Any] = {"chunk_tokens": loss_chunk, "layout": layout}

        def mine(values: Tensor) -> Tensor:
            return layout.own(values) if values.shape[1] == layout.length else values

        def loss(hidden: Tensor, head: Any) -> Tensor:
            return token_loss(mine(hidden), head, labels, **options)[0]

        if self._head is not None:
            with self._head.taking(loss):
                output = self.model(**given)
            if LOSS in output:
                return output[LOSS], (labels != IGNORE_INDEX).sum()
        else:
            output = self.model(**given)
        return token_loss(mine(output.logits), _same, labels, **options)

    def _given(self, ids: Tensor, positions: Tensor, **dealt: SequenceLayout) -> dict[str, Any]:
        # Documents begin where positions do: transformers masks its attention by them.
        given = {"position_ids": positions} if self._takes_positions else {}
        return {"input_ids": ids, "use_cache": False, **given, **dealt}

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.model(**self._given(ids, positions)).logits
        return logits

    @torch.no_grad()
    def require_documents_apart(self, device: torch.device) -> None:
        """Try whether a token changes the logits of another document of its row. Collective.

        Raises:
            StructureError: it does, or the model takes no ``position_ids``.
        """
        ids = torch.arange(2 * _PROBE, device=device)[None]
        other = ids.clone()
        other[:, :_PROBE] += _PROBE + 1
        positions = torch.arange(_PROBE, device=device).repeat(2)[None]
        was = self.training
        self.eval()
        try:
            one, two = (self._logits(x, positions)[:, _PROBE:].float() for x in (ids, other))
        finally:
            self.train(was)
        apart = float((one - two).abs().max())
        bound = 4 * torch.finfo(self.model.dtype).eps * float(one.abs().max())
        if not self._takes_positions or not apart <= bound:
            raise StructureError(
                f"{type(self.model).__name__} does not keep packed documents apart (a token of one "
                f"changes the logits of the next by {apart:.1e}): set data.pack = false"
            )

    def generate(
        self,
        prompt: Tensor,
        tokens: int,
        *,
        seed: int,
        stop_id: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        told: Callable[[int], None] | None = None,
    ) -> Tensor:
        """The model's own generation: ``prompt`` ``[n]`` and at most ``tokens`` more.

        Args:
            told: called with each token as soon as it is there.
        """
        self.eval()
        if not tokens:  # which transformers refuses
            return prompt
        # No limit is 0: transformers takes None for its own of 50.
        sampling = {"temperature": temperature, "top_k": top_k or 0, "top_p": top_p}
        given = sampling if temperature else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            ids: Tensor = self.model.generate(
                prompt[None], attention_mask=torch.ones_like(prompt)[None],
                do_sample=bool(temperature), max_new_tokens=tokens, eos_token_id=stop_id,
                pad_token_id=stop_id, streamer=None if told is None else _Streamer(told),
                **{name: value for name, value in given.items() if value is not None},
            )[0]  # fmt: skip
        return ids


@contextmanager
def one_document_a_row() -> Iterator[None]:
    """Inside, transformers looks for no documents: on tensors without values it cannot.

    It would make a mask of ``[S, S]`` for what may be there.
    """
    from transformers import masking_utils

    with patch.object(masking_utils, "find_packed_sequence_indices", lambda *_: None):
        yield


class _Streamer:
    """What transformers' generation hands tokens to: the prompt, then one at a time."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self._told, self._prompt = told, True

    def put(self, value: Tensor) -> None:
        """The prompt, or the next token."""
        if not self._prompt:
            self._told(int(value))
        self._prompt = False

    def end(self) -> None:
        """The last token has been put."""


def _not_streamed(model: Any, path: Path, dtype: torch.dtype) -> str:
    """Why the folder's weights are not the model's, one by one; empty where they are."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    if getattr(model.config, "quantization_config", None) is not None:
        return "its weights are quantized"
    if dtype.itemsize < 4 and (model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict):
        return f"{type(model).__name__} keeps some of its modules in fp32"
    if get_model_conversion_mapping(model, add_legacy=False):
        return f"transformers converts the weights of a {type(model).__name__}"
    stored = stored_shapes(path)
    named = model.named_parameters(remove_duplicate=False)
    members = [*named, *((n, b) for n, b in model.named_buffers() if n in model.state_dict())]
    for name, member in members:
        alike = {n for n, other in members if other is member} & stored.keys()
        if len(alike) != 1:
            return f"{path} has {'no' if not alike else 'several values of'} {name}"
        if any(stored[n] != list(member.shape) for n in alike):
            return f"{name} has another shape in {path}"
    more = stored.keys() - {name for name, _ in members}
    return f"{path} has {sorted(more)[0]} beside the model's own" if more else ""


def _same(logits: Tensor) -> Tensor:
    return logits

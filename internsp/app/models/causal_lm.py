"""A causal LM of ``transformers`` with the interface of the zoo's models (extra ``[hf]``)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from internsp.app.models.chunked_head import LOSS, ChunkedHead
from internsp.errors import ConfigError, MissingDependencyError, StructureError
from internsp.sp import IGNORE_INDEX, SequenceLayout, token_loss
from internsp.values.load import stored_shapes

_LOG = logging.getLogger(__name__)
_PROBE = 4  # tokens of each of two documents


class HFCausalLM(nn.Module):
    """A causal LM of ``transformers`` as the attribute ``model``, unmodified.

    The names of its parameters start with ``model.``. Auxiliary losses that the model adds to its
    own loss (a router's, for example) are left out.

    Args:
        folder: folder with ``config.json``; with the device ``"cpu"`` its weights
            (``*.safetensors``) are read. Without weights the model's own initialization is used,
            from ``seed``, the same on every rank and mesh.
        device: ``"cpu"`` makes the full model with its values, ``"meta"`` only its shapes.
        weights: whether to use the folder's weights. They are left to
            :func:`internsp.load_weights` (:attr:`unread`) if the folder has every parameter under
            its own name and in its own shape; otherwise they are read in full here.

    Attributes:
        unread: the folder from which the model, on the meta device, must be loaded; or ``None``.

    Raises:
        ConfigError: transformers cannot make a causal LM from the folder.
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
        why = ""
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
                    _LOG.warning("every process reads the full model: %s", why)
                    self.model, told = AutoModelForCausalLM.from_pretrained(
                        path, config=config, dtype=dtype, use_safetensors=True,
                        local_files_only=True, output_loading_info=True,
                    )  # fmt: skip
                    missing = {*told["missing_keys"]}  # which transformers draws anew
                    lost = [n for n, _ in self.model.named_parameters() if n in missing]
                    if lost:
                        raise ValueError(f"{len(lost)} of its weights are missing")
                else:
                    self.unread = path
            else:
                self.model = build(device)
        except MemoryError:
            raise
        except Exception as error:  # transformers and its packages raise many kinds
            text = f"{error} ({why})" if why else str(error)
            raise ConfigError(f"model.path: transformers cannot load {folder}: {text}") from error
        self.model.train()
        self._head = ChunkedHead.of(self.model)
        self._takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters

    def forward(
        self, input_ids: Tensor, *, layout: SequenceLayout, labels: Tensor, loss_chunk: int = 1024
    ) -> tuple[Tensor, Tensor]:
        """The summed token loss of this rank's positions and their count, as from zoo models.

        Logits are computed in chunks if the class's head allows it, else all at once.
        """
        # With a sequence degree the model splits its inputs itself (`internsp.sp.hf`); its logits
        # are this rank's in training, and those of all positions in evaluation.
        dealt = {"layout": layout} if layout.size > 1 else {}
        given = self._inputs(layout.all_ids, layout.all_positions, **dealt)
        options: dict[str, Any] = {"chunk_tokens": loss_chunk, "layout": layout}

        def own_rows(values: Tensor) -> Tensor:
            return layout.own(values) if values.shape[1] == layout.length else values

        def loss(hidden: Tensor, head: Any) -> Tensor:
            return token_loss(own_rows(hidden), head, labels, **options)[0]

        if self._head is not None:
            with self._head.ending_in(loss):
                output = self.model(**given)
            if LOSS in output:
                return output[LOSS], (labels != IGNORE_INDEX).sum()
        else:
            output = self.model(**given)
        return token_loss(own_rows(output.logits), nn.Identity(), labels, **options)

    def _inputs(self, ids: Tensor, positions: Tensor, **dealt: SequenceLayout) -> dict[str, Any]:
        # Documents begin where positions restart: transformers derives its attention mask from it.
        given = {"position_ids": positions} if self._takes_positions else {}
        return {"input_ids": ids, "use_cache": False, **given, **dealt}

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.model(**self._inputs(ids, positions)).logits
        return logits

    @torch.no_grad()
    def check_documents_separate(self, device: torch.device) -> None:
        """Check that a token does not change the logits of another document in its row. Collective.

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
        difference = float((one - two).abs().max())
        bound = 4 * torch.finfo(self.model.dtype).eps * float(one.abs().max())
        if not self._takes_positions or not difference <= bound:
            raise StructureError(
                f"{type(self.model).__name__} does not keep packed documents apart (a token of one "
                f"changes the logits of the next by {difference:.1e}): set data.pack = false"
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
    ) -> Tensor:
        """Generate with the model's own method: ``prompt`` ``[n]`` and at most ``tokens`` more."""
        self.eval()
        if not tokens:  # transformers refuses 0
            return prompt
        # 0 means no limit; for None transformers would use its default of 50.
        sampling = {"temperature": temperature, "top_k": top_k or 0, "top_p": top_p}
        given = sampling if temperature else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            ids: Tensor = self.model.generate(
                prompt[None], attention_mask=torch.ones_like(prompt)[None],
                do_sample=bool(temperature), max_new_tokens=tokens, eos_token_id=stop_id,
                pad_token_id=stop_id,
                **{name: value for name, value in given.items() if value is not None},
            )[0]  # fmt: skip
        return ids


@contextmanager
def skip_packing_detection() -> Iterator[None]:
    """A context in which transformers does not look for packed documents in a batch.

    On tensors without values it cannot detect them, and would make a mask of ``[S, S]`` instead.
    """
    from transformers import masking_utils

    with patch.object(masking_utils, "find_packed_sequence_indices", lambda *_: None):
        yield


def _not_streamed(model: Any, path: Path, dtype: torch.dtype) -> str:
    """Why the folder's weights cannot be loaded one by one by their names; empty if they can."""
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
    return f"{path} has {sorted(more)[0]} in addition to the model's own" if more else ""

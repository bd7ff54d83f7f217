"""The head of a causal LM of ``transformers``, computed on some tokens at a time.

The logits of a long sequence are larger than any other tensor: ``[tokens, vocabulary]``, and their
gradient again. What the model computes between the last hidden states and the logits (a scale, a
soft cap) is defined in its class's ``forward``. So this ``forward`` is run on each chunk, with the
model's body replaced by an object that returns the chunk's hidden states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.modules.parameters import open_weights

_LOG = logging.getLogger(__name__)
LOSS = "token_loss"
"""Key of the loss in the model's output, so that backward starts from a tensor of the output."""

Project = Callable[[Tensor], Tensor]
HiddenLoss = Callable[[Tensor, Any], Tensor]


class ChunkedHead:
    """The head of one model, parallel or not.

    Args:
        model: its ``get_output_embeddings()`` must be an ``nn.Linear`` outside its body.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._linear: nn.Linear = model.get_output_embeddings()
        self._body: str = model.base_model_prefix
        self._chunks: bool | None = None

    @classmethod
    def of(cls, model: Any) -> ChunkedHead | None:
        """A head for ``model``; ``None`` if its head is of another kind: no chunks then."""
        linear, body = model.get_output_embeddings(), getattr(model, model.base_model_prefix, None)
        if type(linear) is not nn.Linear or not isinstance(body, nn.Module) or body is model:
            return None
        return None if any(module is linear for module in body.modules()) else cls(model)

    @contextmanager
    def ending_in(self, loss: HiddenLoss) -> Iterator[None]:
        """A context in which the model's forward ends in ``loss``, output under :data:`LOSS`.

        ``output.logits`` have no meaning then. If the class's forward cannot be run on chunks, the
        model runs as usual and its output has no :data:`LOSS`.

        Args:
            loss: called with the hidden states ``[B, s, H]`` and a head for
                :func:`internsp.sp.token_loss`.
        """
        model, linear = self._model, self._linear
        forward, plain = model.forward, linear.forward
        made: list[Any] = []
        found: list[Tensor] = []

        def call_head(hidden: Tensor) -> Tensor:
            if not self._takes_chunks(hidden, made.pop() if made else None):
                return plain(hidden)
            found.append(loss(hidden, self))
            return hidden[..., :1]  # the class's code continues with a single column

        def call_model(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if found:
                output[LOSS] = found.pop()
            return output

        body = getattr(model, self._body)
        watch = body.register_forward_hook(lambda _, __, output: made.append(output))
        try:
            with (
                _patched(linear, "forward", call_head),
                _patched(model, "forward", call_model),
            ):
                yield
        finally:
            watch.remove()

    def unshard_once(self) -> tuple[Project, Project]:
        """The head as a function of hidden states ``[B, c, H]``; unshards its weight once for all.

        Returns:
            See :meth:`internsp.layers.linear.ParallelLinearWithCommExt.open`.
        """
        weights, guard = open_weights(self._linear)
        return lambda states: self._logits(states, weights), guard

    def _logits(self, states: Tensor, weights: dict[str, Any]) -> Tensor:
        def linear(hidden: Tensor) -> Tensor:
            return F.linear(hidden, weights["weight"], weights["bias"])

        model = self._model
        body = _BodyStub(getattr(model, self._body), states)
        with _patched(self._linear, "forward", linear), _patched(model, self._body, body):
            output = type(model).forward(model, input_ids=None, use_cache=False, return_dict=True)
        logits: Tensor = output.logits
        return logits

    def _takes_chunks(self, hidden: Tensor, made: Any) -> bool:
        """Whether the class's forward can be run on chunks; tried once, the same on all ranks.

        Args:
            hidden: input of the head.
            made: output of the body.
        """
        if self._chunks is not None:
            return self._chunks
        states = getattr(made, "last_hidden_state", None)
        if not (
            isinstance(states, Tensor)
            and states.shape == hidden.shape
            and states.stride() == hidden.stride()
            and states.storage_offset() == hidden.storage_offset()
            and states.untyped_storage()._cdata == hidden.untyped_storage()._cdata
        ):
            self._chunks = False  # forward computes something between body and head, on all tokens
            return False
        features = hidden.shape[-1]
        weights = {"weight": hidden.new_zeros(1, features), "bias": None}
        try:
            with torch.no_grad():
                shape = self._logits(hidden.new_zeros(1, 1, features), weights).shape
            why = "" if shape == (1, 1, 1) else f"it gives logits of the shape {list(shape)}"
        except Exception as error:  # noqa: BLE001 - of any class's code, which then runs unchunked
            why = f"{type(error).__name__}: {error}"
        self._chunks = not why
        if why:
            name = type(self._model).__name__
            _LOG.warning("the logits of a %s are computed at once, not in chunks: %s", name, why)
        return self._chunks


class _BodyStub:
    """Replaces a model's body: any call returns the given hidden states."""

    def __init__(self, body: nn.Module, states: Tensor) -> None:
        self._body, self._states = body, states

    def __call__(self, *args: Any, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(self._states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


class _BodyOutput:
    """Output of the replaced body: hidden states only.

    Other fields are ``None``, as if they were not requested; code that computes with them fails.
    """

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _patched(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """A context in which ``module.name`` is ``value``, set without ``nn.Module.__setattr__``."""
    own = vars(module)
    before = own.get(name, _patched)
    own[name] = value
    try:
        yield
    finally:
        if before is _patched:
            del own[name]
        else:
            own[name] = before

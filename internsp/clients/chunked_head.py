"""The head of a causal model of ``transformers``, on some tokens at a time.

The logits of a long sequence are larger than anything else: ``[tokens, vocabulary]``, and their
gradient again. What stands between the last hidden states and the logits (a scale, a soft cap) is
the model's own class's business, so its own ``forward`` is run on each chunk, with a stand-in for
its body that answers with the chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from internsp.layers.parameters import open_weights

_LOG = logging.getLogger(__name__)
LOSS = "token_loss"
"""Under which a model's output has the loss, so that backward enters through an output of it."""

Project = Callable[[Tensor], Tensor]
OfHidden = Callable[[Tensor, Any], Tensor]


class ChunkedHead:
    """Of one model, parallel or not.

    Args:
        model: its ``get_output_embeddings()`` is an ordinary linear layer beside its body.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._linear: nn.Linear = model.get_output_embeddings()
        self._body: str = model.base_model_prefix
        self._chunks: bool | None = None

    @classmethod
    def of(cls, model: Any) -> ChunkedHead | None:
        """``None`` where the head is of another kind: its logits are made whole."""
        linear, body = model.get_output_embeddings(), getattr(model, model.base_model_prefix, None)
        if type(linear) is not nn.Linear or not isinstance(body, nn.Module) or body is model:
            return None
        return None if any(module is linear for module in body.modules()) else cls(model)

    @contextmanager
    def taking(self, loss: OfHidden) -> Iterator[None]:
        """Inside, the model's forward ends in ``loss``, which stands in its output as :data:`LOSS`.

        ``output.logits`` mean nothing then. Where the class's forward cannot be run on chunks the
        model does what it always does, and its output has no :data:`LOSS`.

        Args:
            loss: called with the hidden states ``[B, s, H]`` and a head for
                :func:`internsp.sp.token_loss`.
        """
        model, linear = self._model, self._linear
        forward, plain = model.forward, linear.forward
        made: list[Any] = []
        found: list[Tensor] = []

        def deferred(hidden: Tensor) -> Tensor:
            if not self._takes_chunks(hidden, made.pop() if made else None):
                return plain(hidden)
            found.append(loss(hidden, self))
            return hidden[..., :1]  # the class's own code goes on with one column

        def whole(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if found:
                output[LOSS] = found.pop()
            return output

        body = getattr(model, self._body)
        watch = body.register_forward_hook(lambda _, __, output: made.append(output))
        try:
            with _in_place(linear, "forward", deferred), _in_place(model, "forward", whole):
                yield
        finally:
            watch.remove()

    def open(self) -> tuple[Project, Project]:
        """The head on hidden states ``[B, c, H]``; its weight is taken once for all chunks.

        Returns:
            As :meth:`internsp.layers.linear.ParallelLinearWithCommExt.open`.
        """
        weights, guard = open_weights(self._linear)
        return lambda states: self._logits(states, weights), guard

    def _logits(self, states: Tensor, weights: dict[str, Any]) -> Tensor:
        def linear(hidden: Tensor) -> Tensor:
            return F.linear(hidden, weights["weight"], weights["bias"])

        model = self._model
        body = _Body(getattr(model, self._body), states)
        with _in_place(self._linear, "forward", linear), _in_place(model, self._body, body):
            output = type(model).forward(model, input_ids=None, use_cache=False, return_dict=True)
        logits: Tensor = output.logits
        return logits

    def _takes_chunks(self, hidden: Tensor, made: Any) -> bool:
        """Whether the class's forward gives logits of a chunk; tried once, alike on all ranks.

        Args:
            hidden: what the head is given.
            made: what the body has answered.
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
            self._chunks = False  # something computes in between, which would do so twice
            return False
        features = hidden.shape[-1]
        weights = {"weight": hidden.new_zeros(1, features), "bias": None}
        try:
            with torch.no_grad():
                shape = self._logits(hidden.new_zeros(1, 1, features), weights).shape
            why = "" if shape == (1, 1, 1) else f"it gives logits of the shape {list(shape)}"
        except Exception as error:  # noqa: BLE001 - any class's code, which then runs as a whole
            why = f"{type(error).__name__}: {error}"
        self._chunks = not why
        if why:
            name = type(self._model).__name__
            _LOG.warning("the logits of a %s are made whole, not in chunks: %s", name, why)
        return self._chunks


class _Body:
    """Answers any call of a model's body with given hidden states."""

    def __init__(self, body: nn.Module, states: Tensor) -> None:
        self._body, self._states = body, states

    def __call__(self, *args: Any, **kwargs: Any) -> _Answer:
        return _Answer(self._states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


class _Answer:
    """A body's output: hidden states, and nothing beside.

    Other fields are ``None``, as where they were not asked for; what is computed with them fails.
    """

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _in_place(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Have ``module.name`` answer with ``value``, past what a module does with attributes."""
    own = vars(module)
    before = own.get(name, _in_place)
    own[name] = value
    try:
        yield
    finally:
        if before is _in_place:
            del own[name]
        else:
            own[name] = before

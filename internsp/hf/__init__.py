"""Sequence parallel for models of ``transformers``, unmodified.

:mod:`.examine` says which models can be served, :mod:`.forward` cuts what the model is given and
makes its loss and outputs whole again, :mod:`.attention` exchanges tokens for heads around the
model's own attention kernel. ``transformers`` is imported only where a model of its own is given.
"""

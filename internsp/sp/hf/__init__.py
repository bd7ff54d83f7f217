"""Sequence parallelism for unmodified ``transformers`` models.

:mod:`.examine` decides which models are supported. :mod:`.forward` shards a model's inputs, reduces
its loss and gathers its outputs. :mod:`.attention` exchanges heads before and after the model's own
attention kernel. ``transformers`` is imported only when one of its models is given.
"""

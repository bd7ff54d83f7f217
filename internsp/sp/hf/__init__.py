"""Sequence parallelism for unmodified ``transformers`` models.

:mod:`.examine` decides which models are supported. :mod:`.forward` shards a model's inputs, reduces
its loss and gathers its outputs. :mod:`.attention` exchanges heads before and after the model's own
attention kernel, and :mod:`.ring` shards positions; :mod:`.attach` sets all of it up. The folder is
a part of :mod:`internsp.sp`. ``transformers`` is imported only when one of its models is given.
"""

"""What a model's parameters are for user code: ``DTensor``, with errors where sharding matters.

Nothing here communicates weights; :mod:`internsp.wp` does.
"""

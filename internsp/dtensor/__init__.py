"""The parameter that a program sees: a ``DTensor``, with errors where sharding matters.

Nothing here communicates weights; :mod:`internsp.wp` does.
"""

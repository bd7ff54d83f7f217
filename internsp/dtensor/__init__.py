"""What a model's parameters are to a program: ``DTensor`` that say so where one process differs.

Nothing here moves a weight; :mod:`internsp.wp` does.
"""

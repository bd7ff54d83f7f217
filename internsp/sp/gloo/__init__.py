"""Heads in parts, over gloo: messages of one attention sublayer between each pair of ranks.

:mod:`.fused` computes a sublayer in parts, in the order of :mod:`.stages`, and :mod:`.messages`
sends them. :class:`.fused.FusedSublayer` is what the rest of :mod:`internsp.sp` knows of it;
``DistributedAttention.attach`` imports it for a gloo group, and nothing else does.
"""

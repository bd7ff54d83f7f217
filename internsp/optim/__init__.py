"""The ZeRO optimizer: gradient slices, norm, loss scale, step, parameter all-gather."""

from internsp.optim.norm import clip_grad_norm_
from internsp.optim.scaler import LossScaler
from internsp.optim.zero import ZeroOptimizer, step_together

__all__ = ["LossScaler", "ZeroOptimizer", "clip_grad_norm_", "step_together"]

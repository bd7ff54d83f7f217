"""The ZeRO optimizer: gradient slices, norm, loss scale, step, parameter all-gather."""

from internsp.optim.norm import clip_grad_norm_ as clip_grad_norm_
from internsp.optim.scaler import LossScaler as LossScaler
from internsp.optim.zero import ZeroOptimizer as ZeroOptimizer
from internsp.optim.zero import step_together as step_together

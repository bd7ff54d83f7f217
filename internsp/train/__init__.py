"""The trainer: data, loop, metrics, report, checkpoint. The composition root."""

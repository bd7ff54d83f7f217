"""Training data: text, rows and token batches."""

"""Text, rows and token batches."""

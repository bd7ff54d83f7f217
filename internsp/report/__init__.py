"""What a run shows: progress, metrics, advice and the page."""

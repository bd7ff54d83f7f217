"""What a run shows: progress, metrics, advice and the report's page."""

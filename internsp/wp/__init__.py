"""Weight parallel: read ``README.md`` beside this file first."""

"""The application: a trainer, what it prints and saves, and its command."""

"""The models that the application trains."""

"""The site of the documentation: `make docs`."""

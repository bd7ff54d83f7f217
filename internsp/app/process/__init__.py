"""This process: where it was started, how it ends, its terminal."""

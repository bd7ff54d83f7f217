"""The training loop, and the trainer of a program."""

"""Starting the ranks of a run on this machine, and what is checked before."""

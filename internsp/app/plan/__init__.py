"""``internsp plan``: schedules, bytes and memory of a run that is not started."""

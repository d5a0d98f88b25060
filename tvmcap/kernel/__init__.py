"""Tasks, search spaces, tuning, and the schedule of every kernel."""

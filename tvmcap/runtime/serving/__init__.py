"""A library behind HTTP: protocol, batches, hot swap, limits, figures."""

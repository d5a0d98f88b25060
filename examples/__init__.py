"""Models and a demo that the tests and the benchmarks use too."""

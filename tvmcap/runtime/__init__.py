"""Loading and calling a library, with TVM's runtime alone."""

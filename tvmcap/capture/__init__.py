"""PyTorch to a well-formed Relax module: export, shapes, operators, IR."""

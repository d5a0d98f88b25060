"""IR to IR: canonicalize, layout, fuse. Each pass is a plain function from IRModule to IRModule."""

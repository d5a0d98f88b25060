"""What every stage shares: errors, options, signatures, manifests, targets, comparison, timing."""

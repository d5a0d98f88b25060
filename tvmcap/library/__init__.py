"""From scheduled kernels to one file: memory plan, lowering, export."""

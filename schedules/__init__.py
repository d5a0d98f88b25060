"""Hand-written kernel families: each file lowers one kind of PrimFunc from a setting of its knobs."""

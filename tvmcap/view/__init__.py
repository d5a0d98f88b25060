"""What the user looks at: scores, tables, explanations, the insides of a library."""

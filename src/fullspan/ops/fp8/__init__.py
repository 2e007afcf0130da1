"""Block-scaled FP8 weights to and from floating point."""

"""Products of the routed experts in FP8."""

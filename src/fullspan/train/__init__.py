"""From a run's configuration to a trained adapter: the session (Python API), the loop over it, and
what they record."""

"""Building blocks that more than one model family uses."""

"""Work on rows whose time is that of the memory it moves."""

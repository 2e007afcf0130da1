"""Lightning-indexer scores and their exact top-k."""

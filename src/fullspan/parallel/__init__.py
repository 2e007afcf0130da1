"""One packed sequence over many ranks: index maps, collectives, and what a model sees of them."""

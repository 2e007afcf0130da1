"""How one packed sequence is spread over ranks: index maps, collectives, and what a model sees of
both.
"""

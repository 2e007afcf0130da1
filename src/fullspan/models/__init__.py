"""Model families. Model files hold no process group: they call the sequence context, the identity
on one rank.
"""

"""From files to packs: reading, chat rendering, packing, order. Leaves out anything that knows
about ranks.
"""

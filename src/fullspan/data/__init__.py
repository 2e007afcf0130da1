"""From files to packs: reading, chat rendering, packing, order. Nothing here knows of ranks."""

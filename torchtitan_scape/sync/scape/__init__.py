"""SCAPE: options, optimizer, state, masks, exchange (SCAPE paper, Algorithms 1 and 2)."""

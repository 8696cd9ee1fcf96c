"""SCAPE: AdamS with a sparse, error-compensated first moment and delayed masks."""

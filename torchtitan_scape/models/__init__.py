"""Model definitions and sizes, and their initialization."""

"""Model definitions and sizes, and initialization that is equal in every layout."""

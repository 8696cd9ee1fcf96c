"""What is saved, how it is kept whole, and how it is taken back by the same or another layout."""

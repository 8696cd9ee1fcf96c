"""Predictions before a cluster is booked: cost of a step, fit of the paper's points, advice, and two commands."""

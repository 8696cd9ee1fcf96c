"""Scores of exported models: tasks of ours and of the papers, the harness that runs them, and what is told of them."""

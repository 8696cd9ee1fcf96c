"""Evaluation of exported models: tasks of this project and of the papers, the harness, and reports."""

"""Where ranks sit, which groups they form, and what crosses which link.

`layout` and `machines` are plain arithmetic; `groups` turns a layout into process groups; `collectives` runs
on those groups and counts its bytes. Useful without the trainer.
"""

"""Where ranks sit, which groups they form, what crosses which link, and what a step then costs.

`layout` and `machines` are plain arithmetic; `groups` turns a layout into process groups; `collectives` runs on those
groups, level by level (`stages`, `lanes`), and counts its bytes. `cost` predicts steps, `plan` answers whether to
compress, `preflight` measures the links. Useful without the trainer.
"""

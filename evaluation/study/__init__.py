"""The training study: what each recipe's error costs in training loss, run by run.

``python -m evaluation.study run`` adds one JSON row per finished run to a file, and goes on where
it was interrupted; ``python -m evaluation.study page`` makes the page and the plot from the rows.
"""

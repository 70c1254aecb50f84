"""Data: read questions from files, the Hub, a user's function or the mini world, and order them into steps.

In reading order:

    rows       rows of files (JSON lines, JSON, CSV, TSV, parquet) and of the Hub; the values in them
    datasets   the paper's twelve datasets: their names, and how their rows are converted to questions
    files      question files, read and written: each row is a question
    sampler    which questions a step plays; their digest; stratified samples
    questions  the names of --data; held-out questions
    __main__   make question files: `python -m prompt_r1.data convert`, `split` and `mix`

This room may import the root, `programs`, `settings` and `miniworld`.
"""

"""Data: from files, the Hub, a function of the user's or the mini world to the questions of each step.

In reading order:

    rows.py       rows of JSON lines, JSON, CSV, TSV and parquet files, and of the Hub
    files.py      from a row to a question
    datasets.py   the paper's twelve datasets: from their own rows to questions; the training mix
    questions.py  the names of --data; held-out questions
    sampler.py    which questions a step plays; stratified samples
    __main__.py   `python -m prompt_r1.data convert`, `split` and `mix`

Imports the root, `programs`, `settings` and the mini world.
"""

"""Data: read questions from files, the Hub, a user's function or the mini world, and order them into steps.

In reading order:

    rows.py       rows of JSON lines, JSON, CSV, TSV and parquet files, and of the Hub
    files.py      question files, read and written: each row is a question
    datasets.py   the paper's twelve datasets: convert their rows to questions; the training mix
    questions.py  the names of --data; held-out questions
    sampler.py    which questions a step plays; stratified samples
    __main__.py   `python -m prompt_r1.data convert`, `split` and `mix`

It may import the root, `programs`, `settings` and the mini world.
"""

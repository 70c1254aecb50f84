"""Question files, and the order in which training sees the questions.

`python -m prompt_r1.data convert|mix|audit` makes question files from the datasets' raw dumps, draws a
training mix, and checks files.
"""

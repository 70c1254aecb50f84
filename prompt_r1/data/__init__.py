"""Question files, and the order in which training sees the questions.

`python -m prompt_r1.data convert|mix` makes question files from the datasets' raw dumps, and draws a training
mix from them.
"""

"""Measurements whose results the documents quote. They are not part of the package.

seeds    prints one table from the evaluations of several seeds; its means and intervals serve all tables
turns    prints the accuracy after each interaction
parts    makes an agent that was shown no chain of two steps
chain    trains SmolLM2 on questions that need a chain of two steps, with five seeds
rules    compares the paper's reward with others, with and without its gate
runs     has what studies share that train agents: processes, games as text, curves
wordings compares a pretrained pair with the best wordings of a request, on each city
lookups  has the folds and demonstrations of `wordings`
cities   has its questions
advice   is a mini world in which a better prompt helps, for the prompt optimisers
"""

"""Measurements whose results the documents quote. They are not part of the package.

seeds    prints one table from the evaluations of several seeds; its means and intervals serve all tables
turns    prints the accuracy after each interaction
parts    makes an agent that was shown no chain of two steps
rules    compares the paper's reward with others, with and without its gate
cities   lets a pretrained model learn to question another
advice   is a mini world in which a better prompt helps, for the prompt optimisers
"""

"""Measurements whose results the documents quote. Not part of the package.

`seeds` prints one table from the evaluations of several seeds, `turns` the accuracy after each interaction.
`parts` makes an agent that was shown no chain of two steps. `cities`: a pretrained model questions another.
`advice`: a mini world in which a better prompt helps, for the prompt optimisers.
"""

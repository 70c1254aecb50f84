"""Compare: methods on the same questions, scored by the same rules. The program is `evaluate.py`.

In reading order:

    predictions.py        an answer, and the file of answers that a repeated evaluation completes
    ask_once.py           `direct` and `cot`
    searches.py           what the prompt optimisers share
    opro.py               the loop of OPRO
    textgrad.py           the loop of TextGrad
    gepa.py               the loop of GEPA
    methods.py            METHODS: what each method is, and what it needs
    settings.py           the flags of evaluate.py
    evaluation.py         what an evaluation compares, and the environments that it asks
    folder_settings.py    what all answers in a folder have in common
    preflight.py          read the flags: choose what is compared, and check it before it starts
    imitation.py          `sft`, `bc` and `rft`: agents that are fine-tuned first
    making.py             make a method: search for prompts, or fine-tune and load an agent that plays
    dry_run.py            estimate what an evaluation will cost
    intervals.py          intervals of means
    similarity.py         SSim: how similar two texts are in meaning
    scores.py             EM, SM, F1 and SSim of each answer, and their means with intervals
    paper_numbers.py      the numbers in the paper's tables
    tables.py             the tables and files of results
    after_training.py     the test at the end of train.py

It may import every other room.
"""

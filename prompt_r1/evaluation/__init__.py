"""Compare: methods on the same questions, scored by the same rules. The program is `evaluate.py`.

In reading order:

    predictions        an answer, and the file of answers that a repeated evaluation completes
    ask_once           `direct` and `cot`
    searches           what the prompt optimisers share
    opro               the loop of OPRO
    textgrad           the loop of TextGrad
    gepa               the loop of GEPA
    methods            METHODS: what each method is, and what it needs
    settings           the flags of evaluate.py
    evaluation         what an evaluation compares
    folder_settings    what all answers in a folder have in common
    preflight          read the flags: choose what is compared, and check it before it starts
    agents             say which agents play, and check that the questions fit into their games
    imitation          `sft`, `bc` and `rft`: agents that are fine-tuned first
    making             make a method: open its environment, search for prompts, or load its agent
    dry_run            estimate what an evaluation will cost
    intervals          intervals of means
    similarity         SSim: how similar two texts are in meaning
    official           EM, SM and F1 by the rules of the paper's release
    scores             EM, SM, F1 and SSim of each answer, and their means with intervals
    paper_numbers      the numbers in the paper's tables
    tables             the tables and files of results
    after_training     the test at the end of train.py

This room may import all rooms.
"""

"""Learn: what a training run does around the loop of train.py.

In reading order:

    start         open the environment, load the models and questions
    weights       load the weights that learn, and the reference
    run           the parts of a run, and what the loop asks of them
    record        what a run writes down: metrics, the best agent, checkpoints; resume
    questions     the questions of a run, and which of them a rank plays
    batches       games → mini-batches → micro-batches of tensors
    row_plans     which games share a micro-batch, and which rank computes it
    metrics       the metrics of games, groups and updates
    update        one optimiser step, and its checks; loss_function: the user's own loss
    validation    greedy games of held-out questions
    alarms        warn if a metric collapses
    log           metrics.jsonl, trajectories/ and the console
    checkpoint    save and resume a run; run_folder: find, claim and check its folder
    export        the agent as a Hugging Face folder
    report        report.html and its curves
    summary       what a run prints at its end
    dry_run       estimate what a run will cost; step_time: on A100s, calculated
    preflight     settings and checks of the programs, before torch is imported
    supervised    fine-tune an agent on games
    warm_start    teach the format by recorded games, a program of its own

It may import every room but evaluation.
"""

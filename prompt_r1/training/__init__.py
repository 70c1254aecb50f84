"""Learn: what a training run does around the loop of train.py.

In reading order:

    start          open the environment, load the models and questions
    models         which weights play, learn and are the reference
    run            the parts of a run and its questions, and what the loop asks of them
    forked_ranks   ranks without torchrun, on a CPU
    signals        what a signal cancels, and when it ends the run
    record         what a run writes down, in an order that is safe to stop: metrics, the best agent,
                   checkpoints; resume; the end
    batches        games → mini-batches → micro-batches of tensors
    row_plans      which games share a micro-batch, and which rank computes it
    loss_function  the loss of a run: eq. 17, or the user's own
    update         one optimiser step, its checks, and the metrics of an update
    metrics        the metrics of games and groups, and what they cost
    validation     greedy games of held-out questions
    alarms         warn if a metric collapses
    log            metrics.jsonl, trajectories/ and the console
    run_folder     make, check and lock the folder of a run
    checkpoint     save and resume a run
    export         the agent as a Hugging Face folder
    summary        where the results of a run are, and what to type next
    report         report.html: results and games
    charts         the curves of a report
    settings       the settings of the warm start
    preflight      read and check the settings of the programs, before torch is imported
    dry_run        estimate what a run will cost
    supervised     fine-tune an agent on games
    warm_start     teach the format by recorded games, a program of its own

Every rank runs this code. A function that takes `Ranks` or a `Run` may exchange data with the other ranks, so
it is called by every rank or by none.

It may import every room but evaluation.
"""

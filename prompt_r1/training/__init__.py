"""Learn: what a training run does around the loop of train.py.

Before the loop:

    settings       the settings of the warm start
    preflight      read and check the settings of train.py, before torch is imported
    run_folder     make, check and lock the folder of a run
    start          fork the ranks, open the environment, load the models and questions
    signals        what a signal cancels, and when it ends the run
    models         which weights play, learn and are the reference
    run            the parts of a run and its questions, and what the loop asks of them
    resume         go on from the newest checkpoint, or begin with step 0

Learn, in each step:

    batches        games → mini-batches → micro-batches of tensors
    row_plans      which games share a micro-batch, and which rank computes it
    loss_function  the loss of a run: eq. 17, or the user's own
    update         one optimiser step, its checks, and the metrics of an update

Write down, in each step:

    record         the order of everything below, which is safe to stop; the end of a run
    metrics        the metrics of games and groups, and what they cost
    log            metrics.jsonl, trajectories/ and the console
    alarms         warn if a metric collapses, by a table of rules

Write down, every --save-every steps:

    validation     greedy games of held-out questions
    best           which agent is the best so far
    checkpoint     the weights, the optimiser and the state of a run: save and load them
    export         the agent as a Hugging Face folder
    report         report.html: results and games
    charts         the curves of a report

After the loop:

    summary        where the results of a run are, and what to type next

Beside a run:

    dry_run        estimate what a run will cost
    forked_ranks   the processes of the ranks on a CPU, without torchrun
    warm_start     teach the format by recorded games, a program of its own
    supervised     fine-tune an agent on games

Every rank runs this code. A function that takes `Ranks` or a `Run` may exchange data with the other ranks, so
it is called by every rank or by none.

This room may import all rooms but `evaluation`.
"""

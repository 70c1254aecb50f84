"""Resume a run from its newest valid checkpoint, or begin a new one with step 0."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prompt_r1.data.sampler import digest_of
from prompt_r1.errors import UsageError
from prompt_r1.model.distributed import Ranks
from prompt_r1.model.model_digest import digest_of_model
from prompt_r1.pair.named_agent import exported_step
from prompt_r1.programs.files import replace_file
from prompt_r1.programs.folders import find_damage
from prompt_r1.settings.fields import write_yaml
from prompt_r1.training.alarms import Alarms
from prompt_r1.training.checkpoint import State, load_tensors, read_state
from prompt_r1.training.log import json_line, read_metrics
from prompt_r1.training.metrics import add_spending
from prompt_r1.training.record import Record
from prompt_r1.training.run import Run
from prompt_r1.training.run_folder import TEST_FILE, checkpoint_of, newest_checkpoint


def resume_run(run: Run) -> Record:
    """The record of a run that goes on from its newest valid checkpoint, or begins with step 0.

    Called by every rank. Raises UsageError if the checkpoint belongs to another run, or if the ranks have
    different questions.
    """
    config, ranks = run.config, run.ranks
    # A new run begins with step 0, which validates the agent before training.
    metrics: dict[str, float] = {"step": 0}
    add_spending(metrics, run.environment, ranks)  # No call is made yet, but every line has these metrics.
    state = State(
        metrics,
        questions=digest_of(run.questions.training),
        validation=digest_of(run.questions.validation),
        start=ranks.on_first_rank(lambda: digest_of_model(run.start)),
    )
    check_same_on_all_ranks([state.questions, state.validation, digest_of(run.questions.test)], ranks)
    alarms = Alarms(agent=config.agent, gap=run.gap_limit, own_reward=bool(config.reward))
    record = Record(run, state, alarms)
    found = ranks.on_first_rank(lambda: newest_checkpoint(run.folder, say=run.log.say))
    if found is not None:
        load_checkpoint(record, found)
    trained = record.state.trained_step
    run.log.begin_after(trained, steps=config.steps)
    ranks.on_first_rank(lambda: trim_run(run.folder, record.state))
    ranks.on_first_rank(lambda: write_yaml(config, run.folder / "config.yaml"))
    for line in read_metrics(run.folder):
        record.alarms.read(line)
    return record


def load_checkpoint(record: Record, checkpoint: Path) -> None:
    """Let a new record go on from a checkpoint. Raises UsageError if it belongs to another run.

    `read_training` has compared the settings already.
    """
    run = record.run
    saved = read_state(checkpoint)
    check_same_origin(checkpoint, saved, record.state, run.start)
    run.log.say(f"Resuming after step {saved.trained_step} of {run.config.steps}, from {checkpoint}")
    record.state = record.saved = saved
    export_best_again(record)
    load_tensors(checkpoint, run.policy, run.optimizer)
    run.refresh()


def export_best_again(record: Record) -> None:
    """Export the best agent of the checkpoint that is resumed, unless RUN/agent is this agent.

    RUN/agent can be another agent in these cases:

    - The run stopped between checkpoint and export. RUN/agent is older, and the best agent is exported now.
    - The newest checkpoint is damaged, so an older one is resumed. RUN/agent may be newer, and the best agent
      that the older checkpoint names is exported.
    - The checkpoint of this best agent is gone or damaged, too. Nothing is exported, and the best agent is
      chosen anew, among the agents from the resumed step on.

    After an export, the policy has the weights of the best agent. The caller loads the resumed weights.
    """
    run, best = record.run, record.state.best
    exported = run.ranks.on_first_rank(lambda: exported_step(run.folder / "agent"))
    if best is None or best.step == exported:
        return
    checkpoint = checkpoint_of(run.folder, best.step)
    if run.ranks.on_first_rank(lambda: find_damage(checkpoint)):
        run.log.say(
            f"The checkpoint of the best agent, of step {best.step}, is gone or damaged: the best agent is "
            f"chosen among the agents from step {record.state.trained_step} on"
        )
        record.state = replace(record.state, best=None)
        return
    load_tensors(checkpoint, run.policy, run.optimizer)
    record.export(read_state(checkpoint).metrics)


def trim_run(run: Path, state: State) -> None:
    """Remove what a run writes again that is resumed in this state.

    The trained step keeps its games, but its metrics are removed, because `finish_step` writes them again. If
    its validation was interrupted, the games of the validation are removed, too. With another number of ranks
    the new games have other names, so the old files would stay. The test is played again, so its games and
    its table are removed too.
    """
    trained = state.trained_step
    last_kept = {"step": trained, "validation": trained if state.is_validated else trained - 1}
    for path in (run / "trajectories").glob("*.jsonl"):
        # The kind and number of validation-000012-rank0.jsonl are "validation" and 12.
        match = re.match(r"(step|validation)-(\d+)-", path.name)
        is_later = match is not None and int(match[2]) > last_kept[match[1]]
        if is_later or path.name.startswith("test-"):
            path.unlink()
    kept = [json_line(line) for line in read_metrics(run) if line["step"] < trained]
    replace_file(run / "metrics.jsonl", "".join(kept).encode())
    (run / TEST_FILE).unlink(missing_ok=True)


def check_same_on_all_ranks(digests: Sequence[str], ranks: Ranks) -> None:
    """Raise UsageError on every rank if the digests of the questions differ between the ranks.

    Each rank takes its share of the questions by their numbers. So if the ranks had different questions, or
    a different order of them, some would be played twice and others never.
    """
    if any(other != digests for other in ranks.gather(digests)):
        raise UsageError(
            "the ranks have different questions, or the same ones in a different order: a function of --data "
            "must return the same list in each process (a set of texts has a different order in each)"
        )


def check_same_origin(checkpoint: Path, saved: State, now: State, start: Path | str) -> None:
    """Raise UsageError if a checkpoint was made with other questions, or from another agent, than now."""
    if saved.questions != now.questions:
        origin = "other questions"
        repair = "give the data and the --val-limit that the run began with"
    elif saved.validation != now.validation:  # EM of other questions cannot be compared.
        origin = "other validation questions"
        repair = "give the --val-data and the --val-limit that the run began with"
    elif saved.start != now.start:
        origin = f"an agent that differs from the one now in {start}"
        repair = "put the agent back that the run began with"
    else:
        return
    raise UsageError(f"{checkpoint} was made with {origin}: {repair}, or start a new run with another --out")

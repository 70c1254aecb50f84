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
from prompt_r1.programs.sealed_folders import find_damage
from prompt_r1.settings.fields import write_yaml
from prompt_r1.training.alarms import Alarms
from prompt_r1.training.best import Candidate
from prompt_r1.training.checkpoint import State, load_tensors, read_state
from prompt_r1.training.log import json_line, read_metrics
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
    state = State(
        open_line={"step": 0},
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
    # A line of metrics is final when nothing will be added to it. See `State`.
    trained, last_final = record.state.trained_step, record.state.last_final_step
    run.log.begin_after(trained, steps=config.steps)
    ranks.on_first_rank(lambda: trim_run(run.folder, trained=trained, last_final=last_final))
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
    record.state = saved
    repair_export(record)
    record.saved = record.state
    load_tensors(checkpoint, run.policy, run.optimizer)
    run.refresh()


def repair_export(record: Record) -> None:
    """Export the best agent again, unless RUN/agent is this agent.

    The export is wrong in two cases:

    - It is missing or too old: the run stopped between checkpoint and export.
    - It is too new: the checkpoint of its step is damaged, so the run resumes from an older one. Then the
      checkpoint of the best agent may be gone, because it was removed when the newer agent became the best.
      If so, the agent of the resumed step counts as the best, until a validation judges an agent.

    After an export, the policy has the weights of the best agent. The caller loads the resumed weights.
    """
    run, best = record.run, record.state.best
    exported = run.ranks.on_first_rank(lambda: exported_step(run.folder / "agent"))
    if best is None or best.step == exported:
        return
    checkpoint = checkpoint_of(run.folder, best.step)
    if run.ranks.on_first_rank(lambda: find_damage(checkpoint)):
        step = record.state.trained_step
        run.log.say(
            f"The checkpoint of the best agent, of step {best.step}, is gone or damaged: the agent of step "
            f"{step} counts as the best until a validation judges an agent"
        )
        best = Candidate(step, em=None, reward=0.0)
        record.state = replace(record.state, best=best)
        checkpoint = checkpoint_of(run.folder, step)
    load_tensors(checkpoint, run.policy, run.optimizer)
    lines = {line["step"]: line for line in read_metrics(run.folder)}
    record.export(lines.get(best.step, {"step": best.step}))


def trim_run(run: Path, *, trained: int, last_final: int) -> None:
    """Remove what a resumed run writes again.

    Games of training are removed after step `trained`, games of validation and lines of metrics after
    `last_final`. With another number of ranks the new files have other names, so the old files would stay.
    The games and the table of the test are removed too, because the test is played again.
    """
    last_kept = {"step": trained, "validation": last_final}
    for path in (run / "trajectories").glob("*.jsonl"):
        # The kind and number of step-000012-rank0.jsonl are "step" and 12. Games of the test have no number.
        match = re.match(r"(step|validation)-(\d+)-", path.name)
        is_later = match is not None and int(match[2]) > last_kept[match[1]]
        if is_later or path.name.startswith("test-"):
            path.unlink()
    kept = [json_line(line) for line in read_metrics(run) if line["step"] <= last_final]
    replace_file(run / "metrics.jsonl", "".join(kept).encode())
    (run / TEST_FILE).unlink(missing_ok=True)


def check_same_on_all_ranks(digests: Sequence[str], ranks: Ranks) -> None:
    """Raise UsageError on every rank if the digests of the questions differ between the ranks.

    Each rank takes its share of the questions by their numbers. So if the ranks had different questions, or
    another order of them, some would be played twice and others never.
    """
    if any(other != digests for other in ranks.gather(digests)):
        raise UsageError(
            "the ranks have different questions, or the same ones in another order: a function of --data "
            "must return the same list in each process (a set of texts has another order in each)"
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
        origin = f"another agent than there is now in {start}"
        repair = "put the agent back that the run began with"
    else:
        return
    raise UsageError(f"{checkpoint} was made with {origin}: {repair}, or start a new run with another --out")

"""What a run says when it has ended: where its results are, and what to type next."""

from pathlib import Path

from prompt_r1.programs.command_line import command
from prompt_r1.settings.agent import HELD_OUT, MINI, AgentConfig, has_own_splits, names_of
from prompt_r1.settings.functions import OBJECT_PREFIX
from prompt_r1.training.run_folder import TEST_FILE


def summary(folder: Path, best_step: int, config: AgentConfig) -> str:
    """Return the text that says where the results are, and what the next commands are."""
    # The settings in a folder may not import code, so the user types --env MODULE:OBJECT again.
    is_own = any(name.startswith(OBJECT_PREFIX) for name in names_of(config.env))
    own_objects = ["--env", config.env] if is_own else []
    agent = f"{folder}/agent: the agent of step {best_step}, a Hugging Face folder"
    if best_step == 0:
        agent += "; it is not trained: no later validation was better"
    text = [
        "Where it is",
        f"  {folder}/report.html: counts, curves and games, to open in a browser",
        f"  {agent}",
        f"  {folder}/metrics.jsonl: the curves; trajectories/: every game",
    ]
    if config.test_data:
        text.append(f"  {folder}/{TEST_FILE}: the test by dataset")
    text += ["What to type next", f"  {command('infer.py', '--agent', folder, *own_objects)}"]
    unseen = unseen_data(config)
    if unseen:
        text.append(f"  {command('evaluate.py', '--agent', folder, *own_objects, '--data', *unseen)}")
    else:  # An agent is not tested on the questions that it was trained on.
        files = ["--out", "train.jsonl", "--test", "test.jsonl"]
        text += [
            "To test an agent, train the next one without some of the questions",
            f"  {command('-m prompt_r1.data', 'split', '--in', *config.data, *files)}",
        ]
    return "\n".join(text)


def unseen_data(config: AgentConfig) -> tuple[str, ...]:
    """The data with questions on which the agent was not trained; () if there is none."""
    if all(name == MINI for name in config.data):
        return ("mini:ood",)
    if all(has_own_splits(name) for name in config.data):
        return config.data  # Its test questions are not its training questions.
    validated = tuple(name for name in config.val_data if name != HELD_OUT)
    return config.test_data or validated

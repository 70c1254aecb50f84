"""`prompt-r1 push DIR ORG/NAME`: upload an exported agent to the Hugging Face Hub."""

from pathlib import Path

from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCard
from yaml import YAMLError

from prompt_r1.cli.command_line import Parser, program_name, run_program
from prompt_r1.cli.markdown import markdown_table
from prompt_r1.config.yaml_files import GAME_FILE, STEP_FILE, read_agent_config
from prompt_r1.errors import UsageError, first_line
from prompt_r1.foreign import check_no_links, is_finite_number, json_object
from prompt_r1.hub import hub_is_reachable

SCORES = {"EM": ("exact_match", "val/em"), "F1": ("f1", "val/f1"), "reward": ("reward", "val/reward")}


def main(arguments: list[str]) -> None:
    """Upload an agent from a command line."""
    about = "Upload an exported agent to the Hugging Face Hub, with its model card, in one commit."
    parser = Parser(program_name("python -m prompt_r1.storage.push"), description=about)
    parser.add_argument("folder", type=Path, metavar="DIR", help="run folder or agent folder")
    parser.add_argument("repository", metavar="ORG/NAME", help="repository on the Hub; made if there is none")
    parser.add_argument("--license", default="", metavar="ID", help="licence (that of the base model's card)")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    given = parser.parse_args(arguments)
    folder = given.folder / "agent" if (given.folder / "agent").is_dir() else given.folder
    if not (folder / GAME_FILE).is_file() or not (folder / STEP_FILE).is_file():
        raise UsageError(f"{folder}: there is no exported agent; give a run folder or its folder agent/")
    check_no_links(folder)
    card = hub_card(folder, given.repository, licence=given.license)
    url = push(folder, given.repository, card, private=given.private)
    if not card.data.get("license"):
        print("The card names no licence, so nobody may use the agent: push again with --license ID.")
    print(url)


def hub_card(folder: Path, repository: str, *, licence: str = "") -> ModelCard:
    """The card of the exported agent, with its place on the Hub and its scores. Raises UsageError."""
    from prompt_r1.storage.export import PLACE, USE_HERE  # only here: it imports torch, which --help does not

    try:
        card = ModelCard.load(folder / "README.md", ignore_metadata_errors=True)
    except (OSError, ValueError, YAMLError) as error:
        raise UsageError(f"{folder / 'README.md'} is not a model card ({first_line(error)})") from None
    name = repository.rpartition("/")[2]
    download = f"hf download {repository} --local-dir {name}\nprompt-r1 ask --agent {name}"
    card.text = card.text.replace(USE_HERE, download).replace(PLACE, repository)
    if licence:
        card.data["license"] = licence
    metrics = json_object((folder / STEP_FILE).read_bytes())
    scores = {label: metrics[key] for label, (_, key) in SCORES.items() if is_finite_number(metrics.get(key))}
    if not scores:
        return card
    data = ", ".join(read_agent_config(folder / GAME_FILE).val_data)
    count = metrics.get("val/n", 0)
    rows = [[label, f"{value:.3f}"] for label, value in scores.items()]
    card.text += (
        f"\n## Scores\n\nOn {count:.0f} validation questions (`{data}`), by which this step was chosen:\n\n"
        f"{markdown_table(['', 'mean'], rows)}\n"
    )
    tested = folder.parent / "test.md"
    if folder.name == "agent" and tested.is_file():
        card.text += f"\nAt the end of the run:\n\n{tested.read_text('utf-8').strip()}\n"
    card.data.model_name = name
    card.data.eval_results = [
        EvalResult("question-answering", "own", f"validation: {data}", SCORES[label][0], value)
        for label, value in scores.items()
    ]
    return card


def push(folder: Path, repository: str, card: ModelCard, *, private: bool) -> str:
    """Upload the files of a folder and a card in one commit; returns the address. Raises UsageError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    additions = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
    additions.append(CommitOperationAdd("README.md", str(card).encode()))
    if not hub_is_reachable(repository):
        raise UsageError(f"{repository}: the Hub cannot be reached, so nothing was pushed; try again online")
    try:
        made = HfApi().create_repo(repository, private=private or None, exist_ok=True)
        message = "Upload an agent trained with Prompt-R1"
        HfApi().create_commit(repository, additions, commit_message=message)
    except Exception as error:  # of the Hub, or of its HTTP client
        raise UsageError(
            f"{repository} could not be pushed ({first_line(error)}): check the name, and that HF_TOKEN or "
            "`hf auth login` lets you write there"
        ) from error
    return str(made)


if __name__ == "__main__":
    run_program(main)

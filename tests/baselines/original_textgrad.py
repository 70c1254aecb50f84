"""Runs the package `textgrad` on scripted updates; it is started by the Python of an environment that has it.

Standard input: a JSON list of searches (see `test_parity.py`). Standard output: for each the prompts after
each update, and every request of the optimiser's model as [system message, request].
"""

import json
import sys
from pathlib import Path


def search(given: dict) -> dict:
    """The updates of evaluation/prompt_optimization.py, on the given batches."""
    import textgrad as tg
    from scripted import criticise
    from textgrad.autograd.string_based_ops import StringBasedFunction
    from textgrad.engine import EngineLM

    requests, tasks = [], []

    class Optimizer(EngineLM):
        model_string = "scripted"

        def generate(self, prompt, system_prompt=None, **_):
            requests.append([system_prompt, prompt])
            return criticise(system_prompt, prompt)

        def __call__(self, prompt, system_prompt=None, **_):
            return self.generate(prompt, system_prompt)

    class Task(Optimizer):
        def generate(self, prompt, system_prompt=None, **_):
            tasks.append([system_prompt, prompt])
            return "r" + prompt.split("q")[-1]

    tg.set_backward_engine(Optimizer(), override=True)
    role = "structured system prompt to a somewhat capable language model"
    system = tg.Variable(given["seed_prompt"], requires_grad=True, role_description=role)
    model = tg.BlackboxLLM(Task(), system)
    optimizer = tg.TextualGradientDescent(engine=Optimizer(), parameters=[system])
    evaluation = StringBasedFunction(lambda prediction, ground_truth_answer: 0, "exact match")
    prompts = []
    for batch in given["batches"]:
        optimizer.zero_grad()
        losses = []
        for name in batch:
            question = tg.Variable(f"question {name}", requires_grad=False, role_description="query")
            gold = tg.Variable(f"gold {name}", requires_grad=False, role_description="correct answer")
            response = model(question)
            losses.append(evaluation(inputs={"prediction": response, "ground_truth_answer": gold}))
        tg.sum(losses).backward()
        optimizer.step()
        prompts.append(system.value)
    return {"prompts": prompts, "requests": requests, "tasks": tasks}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    searches = json.load(sys.stdin)
    shown, sys.stdout = sys.stdout, sys.stderr
    json.dump([search(given) for given in searches], shown)

"""Runs the package `gepa` on scripted searches; it is started by the Python of an environment that has it.

Standard input: a JSON list of searches (see `test_parity.py`). Standard output: for each the calls of the
adapter as [prompt, ids of the questions], the candidates, the best prompt and the number of evaluations.
"""

import json
import sys
from pathlib import Path


def search(given: dict) -> dict:
    """One search of GEPA with its default settings."""
    import gepa
    from gepa.core.adapter import EvaluationBatch
    from scripted import rewrite

    calls, requests = [], []

    class Adapter:
        propose_new_texts = None

        def evaluate(self, batch, candidate, capture_traces=False):
            prompt = candidate["system"]
            calls.append([prompt, [item["id"] for item in batch]])
            scores = [given["scores"][prompt][item["id"]] for item in batch]
            texts = [f"{prompt} says {item['id']}" for item in batch]
            traces = [
                {"data": item, "full_assistant_response": text, "feedback": f"score {score}"}
                for item, text, score in zip(batch, texts, scores, strict=True)
            ]
            shown = traces if capture_traces else None
            return EvaluationBatch(outputs=texts, scores=scores, trajectories=shown)

        def make_reflective_dataset(self, candidate, eval_batch, components_to_update):
            rows = [
                {
                    "Inputs": f"question {trace['data']['id']}",
                    "Generated Outputs": trace["full_assistant_response"],
                    "Feedback": trace["feedback"],
                }
                for trace in eval_batch.trajectories
            ]
            return {"system": rows}

    def reflect(request):
        requests.append(request)
        return rewrite(request, len(given["scores"]))

    class Silent:
        def log(self, message):
            pass

    result = gepa.optimize(
        seed_candidate={"system": given["seed_prompt"]},
        trainset=[{"id": name} for name in given["train"]],
        valset=[{"id": name} for name in given["validation"]],
        adapter=Adapter(),
        reflection_lm=reflect,
        max_metric_calls=given["budget"],
        reflection_minibatch_size=given["batch"],
        seed=given["seed"],
        logger=Silent(),
    )
    return {
        "calls": calls,
        "requests": requests,
        "candidates": [candidate["system"] for candidate in result.candidates],
        "best": result.best_candidate["system"],
        "evaluations": result.total_metric_calls,
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    searches = json.load(sys.stdin)
    shown, sys.stdout = sys.stdout, sys.stderr  # the package may print
    json.dump([search(given) for given in searches], shown)

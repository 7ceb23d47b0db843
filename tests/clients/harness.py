"""lm-eval (`lm-evaluation-harness`), unmodified. Log-likelihoods that it gets by HTTP must be those
of the library's own forward pass with the same checkpoint, on two tasks whose files are in this
folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

TASKS: Final = Path(__file__).parent / "lm_eval_tasks"
LIKELIHOOD_NATS: Final = 0.1
LIKELIHOOD_SHARE: Final = 0.03
"""Largest allowed difference of a log-likelihood from the library's in float32. Log-likelihoods
computed in bfloat16 differed by up to 0.17 if near 0, and by up to 1.7 % otherwise."""
PERPLEXITY_SHARE: Final = 0.01


def commands(record: Mapping[str, Any], out: Path) -> dict[str, list[str]]:
    """The commands for a demo and for the library, with reports below `out`."""
    tokenizer = record["tokenizer_directory"]
    url = f"http://{record['http_address']}/v1/completions"
    served = f"base_url={url},model={record['served_model_name']},tokenizer={tokenizer}"
    library = f"pretrained={record['target_directory']},dtype=float32,max_length=2047"
    models = {
        "served": ["local-completions", f"{served},num_concurrent=2,max_retries=1"],
        "library": ["hf", library, "--device", "cpu"],
    }
    return {
        name: [
            "run",
            "--model",
            model,
            "--model_args",
            *given,
            "--batch_size",
            "4",
            "--tasks",
            "outrider_facts,outrider_notes",
            "--include_path",
            str(TASKS),
            "--log_samples",
            "--output_path",
            str(out / name),
        ]
        for name, (model, *given) in models.items()
    }


def compared(out: Path) -> tuple[list[str], str]:
    """The faults, one a line, and the figures. Raises `ValueError` for an invalid report."""
    served, library = ({**_likelihoods(out / name)} for name in ("served", "library"))
    wrong = [
        f"{place} is {given} by HTTP, {expected} by the library"
        for place, expected in library.items()
        if not _is_close(given := served.get(place, ()), expected)
    ]
    if not library:
        wrong.append("the library's report has no samples")
    ours, theirs = (_results(out / name) for name in ("served", "library"))
    for task, name in (("facts", "acc"), ("facts", "acc_norm"), ("notes", "word_perplexity")):
        mine, its = (found[f"outrider_{task}"] for found in (ours, theirs))
        error = its.get(f"{name}_stderr,none")
        within = error if isinstance(error, int | float) else PERPLEXITY_SHARE * its[f"{name},none"]
        if abs(mine[f"{name},none"] - its[f"{name},none"]) > within:
            wrong.append(f"{task}: {name} is {mine[f'{name},none']}, not {its[f'{name},none']}")
    facts, notes = ours["outrider_facts"], ours["outrider_notes"]
    return wrong, (
        f"{len(library)} log-likelihoods as by the library, acc {facts['acc,none']:.3f}, "
        f"word perplexity {notes['word_perplexity,none']:.2f}"
    )


def _is_close(given: Sequence[float], expected: Sequence[float]) -> bool:
    return len(given) == len(expected) > 0 and all(
        abs(one - other) <= LIKELIHOOD_NATS + LIKELIHOOD_SHARE * abs(other)
        for one, other in zip(given, expected, strict=True)
    )


def _likelihoods(out: Path) -> dict[str, list[float]]:
    """Log-likelihoods by task and document: of each choice, or of the whole text."""
    found = {}
    for path in out.glob("**/samples_*.jsonl"):
        task = path.name.split("_")[2]
        for sample in map(json.loads, path.read_text("utf-8").splitlines()):
            each = [answer[0] for answer in sample["resps"]]
            values = [one[0] if isinstance(one, list) else one for one in each]
            found[f"{task}[{sample['doc_id']}]"] = [float(value) for value in values]
    return found


def _results(out: Path) -> Any:
    (path,) = out.glob("**/results_*.json")
    return json.loads(path.read_text("utf-8"))["results"]

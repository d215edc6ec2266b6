"""`heapr-lab generate`: text of the model's own, to calibrate on."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heapr_lab.cli import options, preflight
from heapr_lab.cli.console import print_facts

if TYPE_CHECKING:
    from heapr_lab.text.corpora import Corpus
    from heapr_lab.workbench.workbench import Workbench


def generate(
    model: options.Model,
    out: Annotated[
        Path, typer.Option(help="The .jsonl file of the texts, for --corpus.")
    ],
    corpus: Annotated[
        str, typer.Option(help="Corpus whose windows, or questions, begin the texts.")
    ] = "pydocs",
    prompt_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of the corpus that begin each text.")
    ] = 8,
    n_texts: Annotated[int, typer.Option(min=1, help="Number of texts.")] = 144,
    n_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="New tokens of each text [default: the profile's]."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.01, help="Divides the logits.")
    ] = 1.0,
    seed: options.Seed = 0,
    profile: options.Profile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Write text that the model itself generates, to calibrate on.

    Each text begins with a few tokens of a corpus and continues as the model would. Of
    a file of conversations the last question of each is answered by the model.
    """
    preflight.check_file(out, suffix=".jsonl")
    preflight.check_corpora([corpus], split="train")
    from heapr_lab.progress import progress_bar
    from heapr_lab.storage.files import replacing
    from heapr_lab.text.corpora import load_corpus
    from heapr_lab.workbench.workbench import open_workbench

    bench = open_workbench(
        model, profile=profile, device=device, dtype=dtype, stream=False
    )
    drawn: dict[str, Any] = {
        "n_new": n_tokens or bench.profile.seq_len,
        "temperature": temperature,
        "seed": seed,
    }
    with progress_bar(f"text of {bench.name}", "token") as bar:
        drawn["progress"] = bar
        text = load_corpus(corpus)
        if text.chat:
            rows, n_new = _answers(bench, text, n_texts, drawn)
        else:
            rows, n_new = _texts(bench, corpus, n_texts, prompt_tokens, drawn)
    with replacing(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    facts = {"model": model, "texts": len(rows), "new_tokens": n_new, "out": str(out)}
    print_facts(facts, as_json=as_json)


def _texts(
    bench: "Workbench", corpus: str, n_texts: int, prompt_tokens: int, drawn: Any
) -> tuple[list[dict[str, Any]], int]:
    """Texts that begin with tokens of the corpus, and how many tokens are new."""
    from heapr_lab.refinement.generation import continuations
    from heapr_lab.text.calibration import load_calibration

    prompts = load_calibration(
        corpus,
        bench.tokenizer,
        n_sequences=n_texts,
        seq_len=prompt_tokens,
        seed=drawn["seed"],
    )
    found = continuations(bench.model, prompts.ids, **drawn)
    rows = []
    for prompt, tokens in zip(prompts.ids, found, strict=True):
        ids = [*prompt.tolist(), *tokens.tolist()]
        rows.append({"text": bench.tokenizer.decode(ids, skip_special_tokens=True)})
    return rows, sum(map(len, found))


def _answers(
    bench: "Workbench", corpus: "Corpus", n_texts: int, drawn: Any
) -> tuple[list[dict[str, Any]], int]:
    """Conversations with answers of the model, and how many tokens are new."""
    import torch

    from heapr_lab.progress import Parts
    from heapr_lab.refinement.generation import continuations
    from heapr_lab.text.conversations import questions

    asked = questions(corpus, bench.tokenizer, limit=n_texts)
    size = drawn["n_new"]
    parts, rows, n_new = Parts(len(asked) * size, drawn["progress"]), [], 0
    for number, (messages, ids) in enumerate(asked):
        options = {**drawn, "seed": drawn["seed"] + number, "progress": parts}
        (tokens,) = continuations(bench.model, torch.tensor([ids]), **options)
        parts.end(size)
        answer = bench.tokenizer.decode(tokens, skip_special_tokens=True)
        rows.append({"messages": [*messages, {"role": "assistant", "content": answer}]})
        n_new += len(tokens)
    return rows, n_new

"""`heapr-lab generate`: text of the model's own, to calibrate on."""

import json
from pathlib import Path
from typing import Annotated

import typer

from heapr_lab.cli import options, preflight
from heapr_lab.cli.console import print_facts


def generate(
    model: options.Model,
    out: Annotated[
        Path, typer.Option(help="The .jsonl file of the texts, for --corpus.")
    ],
    corpus: Annotated[
        str, typer.Option(help="Corpus whose windows begin the texts.")
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

    Each text begins with a few tokens of a corpus and continues as the model would.
    """
    preflight.check_file(out, suffix=".jsonl")
    preflight.check_corpora([corpus], split="train")
    from heapr_lab.models.generation import continuations
    from heapr_lab.progress import progress_bar
    from heapr_lab.storage.files import replacing
    from heapr_lab.text.calibration import load_calibration
    from heapr_lab.workbench.workbench import open_workbench

    bench = open_workbench(model, profile=profile, device=device, dtype=dtype)
    prompts = load_calibration(
        corpus, bench.tokenizer, n_sequences=n_texts, seq_len=prompt_tokens, seed=seed
    )
    with progress_bar(f"text of {bench.name}", "text") as bar:
        found = continuations(
            bench.model,
            prompts.ids,
            n_new=n_tokens or bench.profile.seq_len,
            temperature=temperature,
            seed=seed,
            progress=bar,
        )
    with replacing(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for prompt, tokens in zip(prompts.ids, found, strict=True):
            ids = [*prompt.tolist(), *tokens.tolist()]
            text = bench.tokenizer.decode(ids, skip_special_tokens=True)
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    facts = {
        "model": model,
        "texts": len(found),
        "new_tokens": sum(map(len, found)),
        "out": str(out),
    }
    print_facts(facts, as_json=as_json)

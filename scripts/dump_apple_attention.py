"""Write down what a model's heads do with `Apple raised its price target`.

    python scripts/dump_apple_attention.py --model gpt2 --out out/apple

The sentence is run without its full stop, five tokens of GPT-2's, and with it, six. For each:

    five.safetensors, five.json        the maps of every head
    five_trace.txt, five_trace.json    the five steps of the head in which its gives most to Apple

and over both summary.txt, summary.json: all heads ranked by what its gives to Apple, and what the
last token gives to the first. That is Apple too, and many heads of a trained model park attention
there that they have no use for, so a high rank need not mean that its found its noun.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gpt2attn import AttentionMaps, LanguageModel, load
from gpt2attn.analysis import rank_heads, sink_share
from gpt2attn.cli import run_script
from gpt2attn.files import replacing
from gpt2attn.render.trace_text import trace_text
from gpt2attn.trace import HeadTrace, trace_head

SENTENCES = {"five": "Apple raised its price target", "six": "Apple raised its price target."}
QUERY, KEY = "␣its", "Apple"
PER_LINE = 6


def summarise(text: str, maps: AttentionMaps) -> dict[str, Any]:
    """The heads ranked by what its gives to Apple, and what the last token gives to the first."""
    labels = maps.labels[0]
    if missing := [label for label in (QUERY, KEY) if label not in labels]:
        raise ValueError(
            f"{text!r} has no token {missing[0]} in this model's vocabulary: {' '.join(labels)}."
        )
    query, key = labels.index(QUERY), labels.index(KEY)
    weights = maps.weights[:, 0]  # (layer, head, query, key)
    sink = sink_share(weights)[..., -1]
    return {
        "text": text,
        "ids": maps.ids[0],
        "labels": labels,
        "query": query,
        "key": key,
        "heads": [
            {"layer": layer, "head": head, "share": share}
            for layer, head, share in rank_heads(weights[:, :, query, key])
        ],
        "uniform_share": 1 / (query + 1),
        "sink_share": sink.tolist(),
        "sink_share_mean": float(sink.mean()),
        "uniform_sink_share": 1 / len(labels),
    }


def as_text(summary: dict[str, Any]) -> str:
    """One sentence's summary for a person."""
    ranked, labels = summary["heads"], summary["labels"]
    n_tokens = len(labels)
    lines = [
        f"{summary['text']}   ({n_tokens} tokens: {' '.join(labels)})",
        "",
        f"Share that {QUERY} gives to {KEY}, by layer.head, highest first "
        f"(uniform: {100 * summary['uniform_share']:.1f}%)",
        *(
            "".join(
                f"{h['layer']:>4}.{h['head']:<3}{100 * h['share']:5.1f}%"
                for h in ranked[start : start + PER_LINE]
            )
            for start in range(0, len(ranked), PER_LINE)
        ),
        "",
        f"Share in % that {labels[-1]} gives to {labels[0]}, the first token "
        f"(uniform: 1/{n_tokens} = {100 / n_tokens:.1f}%)",
        f"  mean of all heads: {100 * summary['sink_share_mean']:.1f}%",
        "  layer  head 0, 1, 2 ...",
        *(
            f"  {layer:>5}  {' '.join(f'{100 * share:5.1f}' for share in row)}"
            for layer, row in enumerate(summary["sink_share"])
        ),
    ]
    return "\n".join(lines) + "\n"


def best_trace(lm: LanguageModel, summary: dict[str, Any]) -> HeadTrace:
    """The trace of the head that ranks first."""
    best = summary["heads"][0]
    return trace_head(
        lm.model,
        summary["ids"],
        best["layer"],
        best["head"],
        summary["query"],
        key=summary["key"],
        labels=summary["labels"],
        metadata=lm.provenance,
    )


def write(path: Path, content: str | dict[str, Any]) -> None:
    """A text, or a value as JSON, whole or not at all."""
    if not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path) as part:
        part.write_text(content, encoding="utf-8")


def main(
    model: Annotated[
        str, typer.Option(help="`pocket`, a checkpoint folder, or a Hub repository.")
    ] = "gpt2",
    out: Annotated[Path, typer.Option(help="The folder; made if it is not there.")] = Path(
        "out/apple"
    ),
) -> None:
    """Write the maps, a summary and the best head's trace of the standing sentence."""
    lm = load(model, device="cpu", kernels="torch")
    out.mkdir(parents=True, exist_ok=True)
    summaries, texts = {}, []
    for name, sentence in SENTENCES.items():
        maps = lm.attention(sentence)
        summary = summarise(sentence, maps)
        trace = best_trace(lm, summary)
        for suffix in (".safetensors", ".json"):
            maps.save(out / f"{name}{suffix}")
        write(out / f"{name}_trace.txt", trace_text(trace))
        write(out / f"{name}_trace.json", trace.to_dict())
        summaries[name] = summary
        texts.append(as_text(summary))
    write(out / "summary.json", {"metadata": maps.metadata, **summaries})
    write(out / "summary.txt", f"Model: {model}\n\n" + "\n\n".join(texts))
    typer.echo(out)


if __name__ == "__main__":
    run_script(main)

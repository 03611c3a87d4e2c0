"""Published files and what can be computed from weights alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...analysis import copying_score, ov_copying_scores, ov_eigenvalues
from ...analysis import unembedding_bias as bias_of
from ...files import sha256
from .report import FAILED, OTHER_FILE, PASSED, Figure, Row, head_place
from .subject import Subject


def files(subject: Subject, figure: Figure) -> Iterator[Row]:
    """Size and SHA-256 of the files that the folder has, the number of parameters, the commit."""
    for name, published in figure.expected["files"].items():
        path = subject.source.folder / name
        if path.is_file():
            yield _file_row(figure, path, published)
        else:
            yield figure.not_run(name, "the folder has none")
    n_parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    yield figure.exact("parameters", figure.expected["parameters"], n_parameters)
    revision = figure.expected["revision"]
    if subject.source.revision is None:
        yield figure.not_run("commit", "a folder has none", revision)
    else:
        what, reason = "commit", "a later one may change the model's card alone"
        yield figure.measured(what, revision, subject.source.revision, reason)


def _file_row(figure: Figure, path: Path, published: dict[str, Any]) -> Row:
    found = {"size": path.stat().st_size, "sha256": sha256(path)}
    same = found == published
    verdict, reason = (PASSED, "") if same else (FAILED, OTHER_FILE)
    return Row(figure.name, path.name, published, found, verdict, reason=reason)


def weight_entries(subject: Subject, figure: Figure) -> Iterator[Row]:
    """Numbers out of tensors, as somebody printed them."""
    tensors = dict(subject.model.named_parameters())
    for entry in figure.expected:
        name, row, start = entry["tensor"], entry["row"], entry["start"]
        if name not in tensors:
            raise ValueError(f"the model has no {name}")
        values = tensors[name][row][start:][: len(entry["values"])]
        what = f"{name}[{row}, {start}:]"
        yield figure.close(what, entry["values"], values, figure.tolerance)


def unembedding_bias(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The tokens that ln_f's bias favours most, and by how much."""
    expected, tolerance = figure.expected, figure.tolerance
    bias = bias_of(subject.model).cpu()
    tokens = expected["top_tokens"]
    best = bias.topk(len(tokens)).indices.tolist()
    decode = subject.tokenizer.decode
    yield figure.exact("tokens it favours most", tokens, [decode([id]) for id in best])
    got = bias[[subject.token_id(token) for token in tokens]]
    yield figure.close("their logits", expected["top_values"], got, tolerance["top_values"])
    for token, value in expected["tokens"].items():
        got = bias[subject.token_id(token)]
        yield figure.close(f"logit of {token!r}", value, got, tolerance["tokens"])


def copying_scores(subject: Subject, figure: Figure) -> Iterator[Row]:
    """The OV copying score of every head, and one head's eigenvalues."""
    expected, tolerance = figure.expected, figure.tolerance
    got = ov_copying_scores(subject.model).cpu()
    what = "copying score"
    yield figure.close(what, expected["scores"], got, tolerance["scores"], place=head_place)
    layer, head = expected["eigenvalues"]["layer"], expected["eigenvalues"]["head"]
    found = ov_eigenvalues(subject.model, layer)[head].cpu()
    wanted = torch.complex(
        *(torch.tensor(expected["eigenvalues"][part], dtype=torch.float64) for part in ("re", "im"))
    )
    if len(wanted) != len(found):
        raise ValueError(f"head {layer}.{head} has {len(found)} eigenvalues, not {len(wanted)}")
    # They come in no order: each is compared with the nearest of the others.
    gap = (wanted[:, None] - found).abs()
    distance = max(float(gap.amin(0).max()), float(gap.amin(1).max()))
    what = f"eigenvalues of head {layer}.{head}, largest distance to the nearest"
    yield figure.close(what, 0.0, distance, tolerance["eigenvalues"])
    theirs, ours = (float(copying_score(values)) for values in (wanted, found))
    what = "copying score of these eigenvalues"
    yield figure.close(what, theirs, ours, tolerance["eigenvalues"])

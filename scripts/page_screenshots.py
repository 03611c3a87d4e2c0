"""Write pages of attention maps, short and long, and pictures of them as Chromium shows them.

    python scripts/page_screenshots.py out/pages
    python scripts/page_screenshots.py out/pages --model gpt2 --browser /usr/bin/chromium

Needs `pip install playwright` and a Chromium: the system's, or Playwright's own
(`playwright install chromium`).
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from playwright.sync_api import Page, sync_playwright

import gpt2attn
from gpt2attn.analysis import measure_heads, value_weighted
from gpt2attn.capture import STAGES
from gpt2attn.cli import run_script
from gpt2attn.language_model import LanguageModel
from gpt2attn.render.html import render_page

# Without a network and without the browser's own errands.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SHORT = "Apple raised its price target."
WIDE, PHONE = (1400, 1000), (390, 844)


def page_of(lm: LanguageModel, prompt: str, n_tokens: int | None = None) -> str:
    """The page of a prompt, all stages; with `n_tokens`, continued by the model to that length."""
    ids = lm.encode(prompt)
    n_prompt = len(ids)
    if n_tokens is not None:
        ids = ids + lm.generate(prompt, max_new_tokens=n_tokens - n_prompt, seed=0).ids
    n_head = lm.model.config.n_head

    def norms(layer: int, steps: gpt2attn.AttentionSteps) -> torch.Tensor:
        w_o = lm.model.h[layer].attn.c_proj.weight.unflatten(0, (n_head, -1))
        return value_weighted(torch.ones_like(steps.weights[:, :, :1]), steps.v, w_o)[:, :, 0]

    maps = replace(lm.attention(ids, stages=STAGES), prompt_lengths=[n_prompt])
    return render_page(maps, value_norms=measure_heads(lm.model, ids, norms)[:, 0])


def shots(page: Page, folder: Path, name: str) -> None:
    """Wide, dark and on a phone; and a token and a stage of the wide page."""
    page.goto((folder / f"{name}.html").resolve().as_uri())
    for look, size, scheme in (
        ("wide", WIDE, "light"),
        ("dark", WIDE, "dark"),
        ("phone", PHONE, "light"),
    ):
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme=scheme)
        page.screenshot(path=folder / f"{name}-{look}.png", full_page=True)
    page.set_viewport_size({"width": WIDE[0], "height": WIDE[1]})
    page.keyboard.press("2")
    page.locator("#tokens button").nth(1).hover()
    page.screenshot(path=folder / f"{name}-scaled.png", full_page=True)


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.")],
    model: Annotated[str, typer.Option(help="A model's name or folder.")] = "pocket",
    browser: Annotated[
        Path | None, typer.Option(help="A Chromium; else the one on the path, or Playwright's.")
    ] = None,
) -> None:
    """Write <name>.html and <name>-<look>.png for a short and a long text."""
    lm = gpt2attn.load(model)
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "short": page_of(lm, SHORT),
        "generated": page_of(lm, SHORT.removesuffix("."), 20),
        "long": page_of(lm, SHORT, 300),
    }
    executable = browser or shutil.which("chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        page = chromium.new_context(offline=True, device_scale_factor=2).new_page()
        for name, text in pages.items():
            (folder / f"{name}.html").write_text(text, encoding="utf-8")
            shots(page, folder, name)
            typer.echo(f"{folder / name}.html, {len(text) / 1e6:.1f} MB, and its pictures")
        chromium.close()


if __name__ == "__main__":
    run_script(main)

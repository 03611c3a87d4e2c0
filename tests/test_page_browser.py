"""The page in Chromium: opened from a file without a network, used by mouse, touch and keyboard.

What is drawn is read back from the document and from the canvas's pixels and compared with the
tensors that the page was made of.
"""

import base64
import functools
import math
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from page_maps import HOSTILE, made_maps

from gpt2attn.analysis import rollout
from gpt2attn.render import html
from gpt2attn.render.html import render_page, visible

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PROMPT = {6: 4, 300: 280}
# The colour of one pixel, read from a copy: Chromium remarks on a canvas that is often read itself.
PIXEL = """(canvas, x, y) => {
  const copy = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, Math.floor(x), Math.floor(y), 1, 1, 0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}"""
# The colour of a pixel beside that of the legend, which has a pixel for each of its own places.
COLOUR = 6
MINUS = "\N{MINUS SIGN}"


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
        path = found or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium is installed")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page, and whatever it wrote to the console, threw or asked the network for."""

    page: object
    complaints: list[str] = field(default_factory=list)

    def text(self, id):
        return self.page.locator(f"#{id}").inner_text()

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)

    def choose(self, layer, column):
        self.page.locator(f'[data-layer="{layer}"][data-column="{column}"]').click()

    def token(self, number):
        return self.page.locator(f'#tokens [data-token="{number}"]')

    def entries(self, id):
        """(label, value) of each line of a list."""
        lines = self.page.locator(f"#{id} .entry")
        return [
            (line.locator(".name").inner_text().strip(), line.locator("span").last.inner_text())
            for line in lines.all()
        ]

    def pixel(self, query, key):
        """The colour of a cell of the matrix, off its middle, where a number may be written."""
        return self.page.evaluate(
            """([query, key]) => {
              const canvas = document.getElementById("matrix");
              const place = Object.fromEntries(
                Object.entries(canvas.dataset).map(([name, value]) => [name, Number(value)]));
              const inside = place.cell > 9 ? 0.2 : 0.5;
              const x = place.margin + (key - place.left + inside) * place.cell;
              const y = place.top + (query - place.row + inside) * place.cell;
              return (PIXEL)(canvas, x, y);
            }""".replace("PIXEL", PIXEL),
            [query, key],
        )

    def legend(self, place):
        """The colour at a place, 0 to 1, of the legend."""
        return self.page.evaluate(
            f"(x) => ({PIXEL})(document.getElementById('legend'), x, 5)", round(259 * place)
        )

    def cell(self, query, key):
        """Where a cell is on the screen, from the canvas's corner."""
        place = self.page.evaluate("({...document.getElementById('matrix').dataset})")
        margin, top, cell, row, left = (
            float(place[name]) for name in ("margin", "top", "cell", "row", "left")
        )
        return {"x": margin + (key - left + 0.5) * cell, "y": top + (query - row + 0.5) * cell}

    def focused(self):
        return self.page.evaluate(
            "document.activeElement.id || {...document.activeElement.dataset}"
        )


@pytest.fixture
def open_page(chromium, tmp_path):
    """A function (html, **context options) -> Opened; at the end nothing may have complained."""
    opened = []

    def open_one(text, **options):
        path = tmp_path / f"page{len(opened)}.html"
        path.write_text(text, encoding="utf-8")
        options = {"viewport": {"width": 1400, "height": 1000}, "color_scheme": "light", **options}
        context = chromium.new_context(offline=True, **options)
        one = Opened(context.new_page())
        one.page.on("console", lambda message: one.complaints.append(message.text))
        one.page.on("pageerror", lambda error: one.complaints.append(str(error)))
        one.page.on("dialog", lambda dialog: one.complaints.append(dialog.message))
        one.page.on("request", lambda request: one.complaints.append(request.url))
        one.page.goto(path.as_uri())
        assert one.complaints.pop(0) == path.as_uri()
        opened.append((context, one))
        return one

    yield open_one
    for context, one in opened:
        context.close()
        assert one.complaints == []


@pytest.fixture(params=[6, 300])
def both(request, open_page):
    """(maps, opened page), with generated tokens and value norms, of 6 and of 300 tokens."""
    return used(request.param, open_page)


def used(n_tokens, open_page, **options):
    maps, text = page_of(n_tokens)
    return maps, open_page(text, **options)


@functools.cache
def page_of(n_tokens):
    maps = made_maps(n_tokens, prompt_length=PROMPT[n_tokens])
    norms = torch.linspace(1, 3, 3 * 4 * n_tokens).view(3, 4, n_tokens)
    return maps, render_page(maps, value_norms=norms)


def percent(share):
    value = 100 * share
    if value == 0:
        return "0 %"
    if value < 0.01:
        return "<0.01 %"
    return f"{value:.{2 if value < 0.095 else 1 if value < 99.95 else 0}f} %"


def number_in(readout):
    """The exact number that a readout ends in."""
    return float(re.findall(rf"[{MINUS}\d.e-]+", readout)[-1].replace(MINUS, "-"))


def close(colour, other):
    return all(abs(a - b) <= COLOUR for a, b in zip(colour, other, strict=True))


def test_a_short_page_opens_within_two_seconds(open_page):
    _, opened = used(6, open_page)
    # Of this page alone, from its first byte to the end of its script.
    assert opened.page.evaluate("performance.getEntriesByType('navigation')[0].duration") < 2000
    about = "made · 6 tokens, 2 of them generated · 3 layers \N{MULTIPLICATION SIGN} 4 heads"
    assert opened.text("about") == about
    assert "stored in full, as float32" in opened.text("precision")


def test_the_script_reads_the_numbers_that_were_captured(both, open_page, monkeypatch):
    maps, opened = both
    count = len(maps.ids[0])
    every = """(name) => {
        const numbers = new Float64Array(2 * text.n ** 2);
        let i = 0;
        for (const map of [1, 11])
          for (let query = 0; query < text.n; query++)
            for (let key = 0; key < text.n; key++) numbers[i++] = text.at[name](map, query, key);
        const bytes = new Uint8Array(numbers.buffer);
        let packed = "";
        for (let i = 0; i < bytes.length; i += 4096)
          packed += String.fromCharCode(...bytes.subarray(i, i + 4096));
        return btoa(packed);
    }"""
    if count > 6:
        monkeypatch.setattr(html, "MAX_BYTES", 8_000_000)
        opened = open_page(render_page(maps))
        assert "stored in 8 bits" in opened.text("precision")
    for name, values in maps.stages.items():
        error = opened.page.evaluate(f"text.maps.{name}.error")
        assert (error == 0) == (count == 6)
        packed = bytearray(base64.b64decode(opened.page.evaluate(every, name)))
        read = torch.frombuffer(packed, dtype=torch.float64)
        expected = values.flatten(0, 2)[[1, 11]].flatten().double()
        assert torch.equal(read.isinf(), expected.isinf())
        assert (read - expected).abs()[expected.isfinite()].max().item() <= error + 1e-12


def test_a_click_on_a_head_shows_its_map(both):
    maps, opened = both
    n = len(maps.ids[0])
    weights = maps.weights[:, 0]
    opened.choose(2, 1)
    assert opened.text("detail-title") == "Layer 2, head 1"
    shown = {
        (2, 1): weights[2, 1],
        (1, 4): weights.mean(1)[1],  # the columns after the heads
        (2, 5): rollout(weights)[2],
    }
    for (layer, column), map in shown.items():
        opened.choose(layer, column)
        # Away from the chosen row (the last) and column (the first), which are outlined.
        for query, key in [(4, 3), (n - 3, n // 2), (n // 2 + 1, n // 2)]:
            expected = opened.legend(math.sqrt(map[query, key].item()))
            assert close(opened.pixel(query, key), expected), (layer, column, query, key)
    assert opened.text("detail-title") == "Layer 2, rollout"
    assert opened.pixel(1, 4) == opened.pixel(1, n - 1)  # above the diagonal: bare


def test_a_pointed_at_token_shows_where_it_looks_and_who_looks_at_it(both):
    maps, opened = both
    n = len(maps.ids[0])
    map = maps.weights[1, 0, 3]
    opened.choose(1, 3)
    query = n // 2
    opened.token(query).hover()
    sides = {"back": (map[query, : query + 1], 0), "ahead": (map[query + 1 :, query], query + 1)}
    for id, (line, start) in sides.items():
        best = line.sort(descending=True, stable=True)
        assert opened.entries(id) == [
            (f"␣t{start + place} {start + place}", percent(share))
            for place, share in zip(
                best.indices.tolist()[:5], best.values.tolist()[:5], strict=True
            )
        ]
        # The strongest has the end of the scale for its colour.
        strongest, weakest = best.indices[0].item() + start, best.indices[-1].item() + start
        colour = "(one) => getComputedStyle(one).backgroundColor"
        red = [
            int(re.findall(r"\d+", opened.token(token).evaluate(colour))[0])
            for token in (strongest, weakest)
        ]
        assert red[0] < 70 < red[1]
    opened.page.mouse.move(5, 5)
    assert opened.text("back-title") == f"t{n - 1} ({n - 1}) looks most at"
    opened.token(query).click()
    opened.page.mouse.move(5, 5)
    assert opened.text("back-title") == f"t{query} ({query}) looks most at"


def test_every_stage_is_shown_by_click_and_by_key(both):
    maps, opened = both
    n = len(maps.ids[0])
    query, key = n - 1, n - 2
    opened.choose(0, 2)
    opened.page.locator("#matrix").click(position=opened.cell(query, key))
    opened.page.mouse.move(5, 5)
    for name, digit in (("scores", "1"), ("scaled", "2"), ("masked", "3"), ("weights", "4")):
        values = maps.head(0, 2, stage=name)
        opened.press(digit)
        by_key = opened.text("readout"), opened.pixel(3, 2)
        opened.press("5")  # another, so that the click changes something
        assert opened.text("readout") != by_key[0]
        opened.page.locator("#stages label").nth(int(digit) - 1).click()
        opened.page.mouse.move(5, 5)
        assert (opened.text("readout"), opened.pixel(3, 2)) == by_key
        tolerance = opened.page.evaluate(f"text.maps.{name}.error")
        written = number_in(by_key[0].removesuffix(")"))
        # Nine digits are written of an exact number, three of one in 8 bits.
        rel = 1e-8 if tolerance == 0 else 5e-3
        assert written == pytest.approx(values[query, key].item(), rel=rel, abs=tolerance)
        place = values[3, 2].item()
        if name != "weights":
            finite = values[values.isfinite()]
            place = (place - finite.min()) / (finite.max() - finite.min())
        place = math.sqrt(place) if name == "weights" else place
        assert close(by_key[1], opened.legend(float(place)))
    opened.press("3")
    opened.page.locator("#matrix").hover(position=opened.cell(1, 4))
    assert opened.text("readout") == "t1 (1) → t4 (4): masked, t4 (4) comes later"
    opened.press("1")
    opened.page.locator("#matrix").hover(position=opened.cell(1, 3))
    assert opened.text("readout").endswith("computed but masked afterwards")
    opened.press("5")
    opened.page.locator("#matrix").hover(position=opened.cell(query, key))
    norm = torch.linspace(1, 3, 3 * 4 * n).view(3, 4, n)[0, 2, key]
    expected = (maps.head(0, 2)[query, key] * norm).item()
    assert number_in(opened.text("readout")) == pytest.approx(expected, rel=1e-2, abs=3e-3)


def test_the_slider_goes_through_the_generation(both):
    maps, opened = both
    n, prompt = len(maps.ids[0]), maps.prompt_lengths[0]
    step = opened.page.locator("#step")
    assert (step.get_attribute("max"), step.input_value()) == (str(n - prompt), str(n - prompt))
    assert opened.token(prompt).get_attribute("class") == "made"
    bare = opened.pixel(1, n - 1)
    assert opened.pixel(n - 1, n - 2) != bare

    step.focus()
    opened.press("Home")
    _wait_until(opened.page, "text.prompt_length === state.shown")
    assert opened.text("step-note") == (
        f"0 of {n - prompt}: the prompt has been read; its last token now looks back, and the "
        f"model chooses “␣t{prompt}”."
    )
    assert opened.pixel(min(prompt + 2, n - 1), 3) == opened.pixel(n - 1, n - 2) == bare
    assert opened.pixel(prompt - 2, 2) != bare
    assert opened.token(prompt).get_attribute("class") == "made future"
    assert opened.text("back-title") == f"t{prompt - 1} ({prompt - 1}) looks most at"
    share = maps.weights[:, 0, :, prompt - 1, 0].mean().item()
    assert opened.text("sink").startswith(
        f"{percent(share)} of the last token's attention lands on the first token, on average over "
        f"these 12 heads (the bar under each); uniform would be {percent(1 / prompt)}."
    )
    step.blur()
    opened.press("]")
    assert step.input_value() == "1"
    assert opened.pixel(prompt, 3) != bare
    opened.press("[", "[")  # not into the prompt
    assert opened.text("step-note").startswith(f"0 of {n - prompt}: the prompt has been read")


def test_the_keyboard_alone_reaches_everything(both):
    maps, opened = both
    n = len(maps.ids[0])
    opened.page.locator("#theme").focus()
    opened.press("Tab")
    assert opened.focused() == {"layer": "0", "column": "0"}
    outline = opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    opened.press("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowUp")
    assert opened.focused() == {"layer": "0", "column": "2"}
    assert opened.text("detail-title") == "Layer 0, head 2"
    opened.press("Enter")
    assert opened.focused() == {"token": str(n - 1)}
    opened.press("ArrowLeft", "ArrowLeft")
    assert opened.focused() == {"token": str(n - 3)}
    assert opened.text("back-title") == f"t{n - 3} ({n - 3}) looks most at"
    opened.press("Enter")
    assert opened.focused() == "matrix"
    opened.press("ArrowRight", "ArrowUp")
    share = maps.head(0, 2)[n - 4, 1].item()
    assert opened.text("readout").startswith(f"t{n - 4} ({n - 4}) → t1 (1): {percent(share)}")
    opened.press("Escape")
    assert opened.focused() == {"token": str(n - 4)}
    opened.press("Escape")
    assert opened.focused() == {"layer": "0", "column": "2"}


def test_a_long_matrix_is_zoomed_to_the_chosen_cell(open_page):
    maps, opened = used(300, open_page)
    opened.page.locator("#matrix").focus()
    opened.press("ArrowUp", *["+"] * 6)
    assert opened.page.locator("#matrix").evaluate("one => Number(one.dataset.span)") == 6
    map = maps.head(0, 0)
    assert close(opened.pixel(297, 2), opened.legend(math.sqrt(map[297, 2].item())))
    opened.press(*["ArrowRight"] * 9)  # past the window's edge: it follows
    assert close(opened.pixel(297, 8), opened.legend(math.sqrt(map[297, 8].item())))
    opened.press("0")
    assert opened.page.locator("#matrix").evaluate("one => Number(one.dataset.span)") == 300


def test_heads_are_found_by_from_and_to(both):
    maps, opened = both
    query, key = 5, 2
    opened.page.locator("#from").select_option(str(query))
    opened.page.locator("#to").select_option(str(key))
    best = maps.weights[:, 0, :, query, key].flatten().sort(descending=True, stable=True)
    assert opened.entries("ranking") == [
        (f"Layer {place // 4}, head {place % 4}", percent(share))
        for place, share in zip(best.indices.tolist()[:8], best.values.tolist()[:8], strict=True)
    ]
    opened.page.locator("#ranking button").first.click()
    layer, head = divmod(best.indices[0].item(), 4)
    assert opened.text("detail-title") == f"Layer {layer}, head {head}"
    assert opened.text("readout").startswith(f"t{query} ({query}) → t{key} ({key}): ")


def test_hostile_labels_are_text(open_page):
    maps = made_maps(len(HOSTILE), labels=HOSTILE)
    maps.metadata["model"] = HOSTILE[0]
    opened = open_page(render_page(maps, title=HOSTILE[1]))
    assert opened.page.title() == HOSTILE[1]
    assert opened.page.locator("h1").text_content() == HOSTILE[1]
    for number, label in enumerate(HOSTILE):
        assert opened.token(number).text_content() == visible(label)
        assert opened.page.locator("#from option").nth(number).text_content() == (
            f"{number} {visible(label)}"
        )
        opened.token(number).hover()
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.evaluate("document.scripts.length") == 2
    assert opened.page.evaluate("document.querySelectorAll('img, iframe, link, a').length") == 0


def test_text_that_got_in_could_still_load_and_run_nothing(open_page):
    opened = open_page(render_page(made_maps(3)))
    failures = []
    opened.page.on("requestfailed", lambda request: failures.append(request.failure))
    opened.page.evaluate(
        """async () => {
          const image = document.createElement("img");
          image.src = "https://example.com/a.png";
          const script = document.createElement("script");
          script.textContent = "window.hacked = 1";
          document.body.append(image, script);
          await new Promise((done) => setTimeout(done, 100));
        }"""
    )
    assert opened.page.evaluate("window.hacked") is None
    assert failures == ["csp"]
    assert len([one for one in opened.complaints if "Content Security Policy" in one]) == 2
    opened.complaints.clear()


@pytest.mark.parametrize("n_tokens", [6, 300])
def test_a_phone_shows_all_of_it_by_touch(n_tokens, open_page):
    size = {"width": 360, "height": 740}
    _, opened = used(n_tokens, open_page, viewport=size, has_touch=True, is_mobile=True)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 360
    opened.page.locator('[data-layer="1"][data-column="2"]').tap()
    assert opened.text("detail-title") == "Layer 1, head 2"
    opened.token(2).tap()
    assert opened.text("back-title") == "t2 (2) looks most at"
    opened.page.locator("#matrix").tap(position=opened.cell(n_tokens - 1, n_tokens // 2))
    readout = opened.text("readout")
    assert readout.startswith(f"t{n_tokens - 1} ({n_tokens - 1}) → t")


def test_dark_and_light_are_followed_and_can_be_chosen(open_page):
    _, opened = used(6, open_page, color_scheme="dark")

    def brightness():
        style = "getComputedStyle(document.body)"
        colours = opened.page.evaluate(f"[{style}.backgroundColor, {style}.color]")
        return [int(re.findall(r"\d+", colour)[0]) for colour in colours]

    def ramp():
        return [sum(opened.legend(place / 10)) for place in range(11)]

    assert brightness()[0] < 40 < 200 < brightness()[1]
    assert ramp() == sorted(ramp())
    opened.page.locator("#theme").click()
    assert brightness()[1] < 40 < 200 < brightness()[0]
    assert ramp() == sorted(ramp(), reverse=True)
    assert opened.page.locator("#theme").inner_text() == "Dark"
    opened.page.emulate_media(color_scheme="light")
    opened.page.locator("#theme").click()
    assert brightness()[0] < 40


def test_on_paper_it_is_light_whole_and_in_proportion(open_page):
    _, opened = used(300, open_page, color_scheme="dark")
    dark = opened.legend(0)
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    opened.page.emulate_media(media="print")
    assert max(dark) < 60 < 200 < min(opened.legend(0))
    width, height = opened.page.evaluate("[innerWidth, innerHeight]")
    box, drawn = opened.page.evaluate(
        """() => {
          const canvas = document.getElementById("matrix");
          const box = canvas.getBoundingClientRect();
          return [[box.width, box.height], [canvas.width, canvas.height]];
        }"""
    )
    assert box[0] <= width
    assert box[1] <= 0.86 * height
    assert box[0] / box[1] == pytest.approx(drawn[0] / drawn[1], rel=0.01)
    assert opened.page.evaluate("[$('tokens').scrollHeight - $('tokens').clientHeight]") == [0]
    assert "model.safetensors" in opened.text("source")
    assert not opened.page.locator("#theme").is_visible()
    opened.page.emulate_media(media="screen")
    opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.legend(0) == dark
    assert not opened.page.locator("#source").is_visible()


def test_several_texts_have_a_chooser(open_page):
    long, short = made_maps(7), made_maps(4)
    stages = {
        name: torch.cat([values, torch.nn.functional.pad(short.stages[name], (3, 0, 3, 0))], dim=1)
        for name, values in long.stages.items()
    }
    both = type(long)(
        stages,
        long.layers,
        long.heads,
        long.ids + short.ids,
        long.labels + short.labels,
        [7, 4],
    )
    opened = open_page(render_page(both))
    assert opened.page.locator("#tokens button").count() == 7
    opened.page.locator("#text").select_option("1")
    assert opened.page.locator("#tokens button").count() == 4
    share = short.weights[0, 0, 0, 3, 0].item()
    assert opened.text("readout").startswith(f"t3 (3) → t0 (0): {percent(share)}")


def test_one_token_and_one_head_are_a_page_too(open_page):
    opened = open_page(render_page(made_maps(1, layers=[4], heads=[7], stages=("weights",))))
    assert opened.text("detail-title") == "Layer 4, head 7"
    assert opened.entries("back") == [("␣t0 0", "100 %")]
    assert not opened.page.locator("#search").is_visible()
    assert not opened.page.locator("#stages").is_visible()
    assert not opened.page.locator("#sink").is_visible()


def test_scores_alone_are_a_page_too(open_page):
    opened = open_page(render_page(made_maps(5, stages=("scores",))))
    assert not opened.page.locator("#sink").is_visible()
    assert opened.text("stage-note").startswith("Q·Kᵀ")
    assert "its number with each token" in opened.text("matrix-lead")


@pytest.mark.slow
def test_1024_tokens_stay_usable(open_page):
    maps = made_maps(1024, layers=[5], heads=list(range(6)), stages=("weights",))
    opened = open_page(render_page(maps))
    opened.choose(0, 3)
    opened.token(700).click()
    opened.page.mouse.move(5, 5)
    best = maps.weights[0, 0, 3, 700].sort(descending=True, stable=True)
    assert opened.entries("back")[0] == (
        f"␣t{best.indices[0]} {best.indices[0]}",
        percent(best.values[0].item()),
    )
    # What a person does with the mouse must keep up with it: 20 ms on a free core.
    spent = opened.page.evaluate(
        """() => {
          const start = performance.now();
          for (let i = 0; i < 10; i++) { drawText(500 + i); drawMatrix(500 + i, i); }
          return (performance.now() - start) / 10;
        }"""
    )
    assert spent < 300


def _wait_until(page, condition):
    """Wait for a JavaScript condition, asked from outside: the page may not evaluate strings."""
    deadline = time.monotonic() + 20
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)

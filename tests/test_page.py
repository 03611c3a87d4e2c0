"""The page as a file: its numbers are the maps', nothing in it is more than text, nothing loads."""

import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from page_maps import HOSTILE, STAGES, made_maps

from gpt2attn import AttentionMaps
from gpt2attn.analysis import rollout
from gpt2attn.render import html
from gpt2attn.render.html import page_bytes, render_page, visible

VOID = {"meta", "input", "br", "img", "link"}
# Float32 counts for exact; at 8 bits what the page states may be off by float64's own rounding.
ROUNDING = 1e-12


class Elements(HTMLParser):
    """Every element with its attributes, and the text in it; fails where tags do not match."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found, self.texts, self._open = [], {}, []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, tuple(attributes)))
        self.texts[len(self.found) - 1] = ""
        if tag not in VOID:
            self._open.append((tag, len(self.found) - 1))

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        if self._open:
            self.texts[self._open[-1][1]] += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    def text_of(self, tag, **attributes):
        (place,) = [
            i
            for i, (name, found) in enumerate(self.found)
            if name == tag and attributes.items() <= dict(found).items()
        ]
        return self.texts[place]


def data_of(page):
    return json.loads(Elements(page).text_of("script", id="data"))


def unpacked(packed, n_tokens, above):
    """(map, query, key) in float64, read as page.js does it but in NumPy."""
    numbers = np.frombuffer(base64.b64decode(packed["data"]), packed["dtype"])
    kept = np.ones((n_tokens, n_tokens), bool)
    kept = np.tril(kept) if packed["causal"] else kept
    numbers = numbers.reshape(-1, kept.sum())
    values = np.full((len(numbers), n_tokens, n_tokens), above, float)
    values[:, kept] = numbers
    if packed["dtype"] == "uint8":
        values[:, ~kept] = 0
        rows = np.frombuffer(base64.b64decode(packed["rows"]), "<f4").astype(float)
        low, step = rows.reshape(-1, n_tokens, 2, 1).swapaxes(0, 2).swapaxes(1, 2)
        decoded = low + values * step
        decoded = decoded**2 if packed["root"] else decoded
        values = np.where(values == 255, -np.inf, decoded)
        values[:, ~kept] = above
    return values


def read(page, text=0):
    """Every set of maps in a page, by name, and the error that the page states for it."""
    entry = data_of(page)["texts"][text]
    n_tokens = len(entry["labels"])
    above = {"masked": -np.inf}
    maps = {
        name: unpacked(packed, n_tokens, above.get(name, 0.0))
        for name, packed in entry["maps"].items()
    }
    return maps, {name: packed["error"] for name, packed in entry["maps"].items()}


@pytest.fixture
def eight_bits(monkeypatch):
    """A limit that 40 tokens at float32 pass and at 8 bits do not."""
    monkeypatch.setattr(html, "MAX_BYTES", 200_000)


def test_numbers_are_the_tensors_to_the_bit():
    maps = made_maps(40)
    numbers, errors = read(render_page(maps))
    for name in STAGES:
        assert np.array_equal(numbers[name], maps.stage(name).flatten(0, 2).numpy())
    weights = maps.weights[:, 0]
    assert np.array_equal(numbers["mean"], weights.mean(1).numpy())
    assert np.array_equal(numbers["rollout"], rollout(weights).numpy())
    assert set(errors.values()) == {0.0}


def test_eight_bits_are_as_close_as_the_page_says(eight_bits):
    maps = made_maps(40)
    # A row that is all alike, and minus infinity where scores are otherwise finite.
    maps.stages["scaled"][0, 0, 1, 5] = 2.5
    maps.stages["scores"][2, 0, 3, 7, 1] = -torch.inf
    numbers, errors = read(render_page(maps))
    for name in STAGES:
        expected = maps.stage(name).flatten(0, 2).double().numpy()
        assert np.array_equal(np.isinf(numbers[name]), np.isinf(expected))
        finite = np.isfinite(expected)
        off = np.abs(numbers[name][finite] - expected[finite]).max()
        assert off == pytest.approx(errors[name], abs=ROUNDING)
    # Half a step: of a row's range, and for weights of the root of its largest, squared.
    assert 0 < errors["scaled"] <= np.ptp(maps.stage("scaled").numpy(), axis=-1).max() / 508 + 1e-6
    assert 0 < errors["weights"] <= 1 / 254 + 1e-6


def test_small_weights_keep_their_size_in_eight_bits(eight_bits):
    maps = made_maps(40, stages=("weights",), layers=list(range(20)))
    row = torch.tensor([0.95, 0.0] + [0.001] * 36 + [0.007] * 2)
    maps.weights[:] = row.expand(40, 40).tril()
    numbers, _ = read(render_page(maps))
    # Even steps would be of 0.95 / 254 = 0.004, and 0.001 would come out as nothing.
    assert numbers["weights"][0, 39] == pytest.approx(row.double().numpy(), rel=0.13, abs=0)


def test_rollout_needs_every_layer_from_the_first_and_the_mean_more_than_one_head():
    def combined(**options):
        return read(render_page(made_maps(5, **options)))[0].keys() & {"mean", "rollout"}

    assert combined() == {"mean", "rollout"}
    assert combined(layers=[1, 2]) == {"mean"}
    assert combined(layers=[0], heads=[3]) == set()
    assert combined(stages=("scores",)) == set()


def test_each_text_of_a_batch_stands_alone():
    long, short = made_maps(7), made_maps(4)
    stages = {
        name: torch.cat([values, torch.nn.functional.pad(short.stages[name], (3, 0, 3, 0))], dim=1)
        for name, values in long.stages.items()
    }
    both = AttentionMaps(
        stages,
        long.layers,
        long.heads,
        long.ids + short.ids,
        long.labels + short.labels,
        [7, 2],
    )
    norms = torch.arange(3 * 2 * 4 * 7.0).view(3, 2, 4, 7)
    page = render_page(both, value_norms=norms)
    for number, alone in enumerate([long, short]):
        numbers, _ = read(page, number)
        assert np.array_equal(numbers["masked"], alone.stage("masked").flatten(0, 2).numpy())
        entry = data_of(page)["texts"][number]
        assert entry["labels"] == alone.labels[0]
        assert entry["prompt_length"] == [7, 2][number]
        packed = np.frombuffer(base64.b64decode(entry["value_norms"]), "<f4")
        expected = norms[:, number, :, -len(alone.ids[0]) :]
        assert np.array_equal(packed, expected.flatten().numpy())


def test_value_norms_of_one_text_need_no_batch_axis_and_must_fit():
    maps = made_maps(5)
    norms = torch.rand(3, 4, 5)
    assert render_page(maps, value_norms=norms) == render_page(maps, value_norms=norms[:, None])
    with pytest.raises(ValueError, match=r"value_norms must be .*\(3, 1, 4, 5\).*\(3, 1, 4, 6\)"):
        render_page(maps, value_norms=torch.rand(3, 4, 6))


def test_six_heads_of_1024_tokens_are_exact_and_under_25_mb():
    maps = made_maps(1024, layers=[5], heads=list(range(6)), stages=("weights",))
    page = render_page(maps)
    assert len(page.encode()) < 25_000_000
    assert data_of(page)["texts"][0]["maps"]["weights"]["dtype"] == "float32"


@pytest.mark.parametrize("itemsize", [4, 1])
def test_the_size_is_known_beforehand(itemsize, monkeypatch):
    maps = made_maps(50)
    if itemsize == 1:
        monkeypatch.setattr(html, "MAX_BYTES", page_bytes(maps, 4) - 1)
    packed = data_of(render_page(maps))["texts"][0]["maps"].values()
    actual = sum(len(one["data"]) + len(one["rows"] or "") for one in packed)
    # Each base64 text ends in up to two bytes of padding.
    assert page_bytes(maps, itemsize) == pytest.approx(actual, abs=4 * 12)


def test_a_page_too_large_is_refused_before_any_work_with_the_size_and_the_remedy():
    room = torch.zeros(1).expand(12, 1, 12, 1024, 1024)
    maps = AttentionMaps(
        {"weights": room},
        list(range(12)),
        list(range(12)),
        [[0] * 1024],
        [["a"] * 1024],
        [1024],
    )
    message = r"144 heads and 1,024 tokens would take 119 MB .* at most 28 heads"
    with pytest.raises(ValueError, match=message):
        render_page(maps)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_damaged_numbers_are_refused(bad):
    maps = made_maps(4)
    maps.stages["scaled"][1, 0, 2, 3, 1] = bad
    with pytest.raises(ValueError, match="The scaled hold NaN or infinity"):
        render_page(maps)


def test_maps_that_look_ahead_are_refused():
    maps = made_maps(4)
    maps.stages["weights"][1, 0, 2, 1, 3] = 0.1
    with pytest.raises(ValueError, match="The weights look ahead"):
        render_page(maps)


def test_maps_of_nothing_are_refused():
    with pytest.raises(ValueError, match="nothing to show"):
        render_page(replace(made_maps(3), stages={}))


def test_hostile_text_adds_no_element_and_no_attribute():
    harmless = Elements(render_page(made_maps(len(HOSTILE)), title="x"))
    maps = made_maps(len(HOSTILE), labels=HOSTILE)
    maps.metadata.update({"model": HOSTILE[0], HOSTILE[1]: {"a": HOSTILE}})
    hostile = Elements(render_page(maps, title="".join(HOSTILE)))

    assert hostile.found == harmless.found
    assert Counter(tag for tag, _ in hostile.found)["script"] == 2
    assert hostile.text_of("title") == "".join(map(visible, HOSTILE))
    raw = hostile.text_of("script", id="data")
    assert raw.isascii()
    assert not re.search("[<>&]", raw)
    assert json.loads(raw)["texts"][0]["labels"] == [visible(label) for label in HOSTILE]
    assert ["model", HOSTILE[0]] in json.loads(raw)["source"]


def test_what_hides_or_reorders_text_is_spelt_out():
    assert visible("a\u202eb") == "a⟨U+202E⟩b"
    assert visible("\x00\u2028\u2029\ufeff\ud83d") == ("⟨U+0000⟩⟨U+2028⟩⟨U+2029⟩⟨U+FEFF⟩⟨U+D83D⟩")
    assert visible("␣naïve <b> שלום 🙂") == "␣naïve <b> שלום 🙂"


def test_the_page_names_nothing_to_load_and_forbids_all_but_its_own_parts():
    page = render_page(made_maps(6), value_norms=torch.rand(3, 4, 6))
    elements = Elements(page)
    attributes = [name for _, found in elements.found for name, _ in found]
    assert not {"src", "href", "srcset", "action", "style", "data", "poster"} & set(attributes)
    assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"\w:/|url\(|@import|image-set\(|fetch\(|import\(", page)

    metas = [dict(found) for tag, found in elements.found if tag == "meta"]
    (policy,) = [meta["content"] for meta in metas if "http-equiv" in meta]
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    scripts = [place for place, (tag, _) in enumerate(elements.found) if tag == "script"]

    def digest(text):
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    assert allowed == {
        "default-src": "'none'",
        "script-src": f"'sha256-{digest(elements.texts[scripts[-1]])}'",
        "style-src": f"'sha256-{digest(elements.text_of('style'))}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_a_page_is_the_same_every_time_and_says_where_its_numbers_come_from():
    maps = made_maps(6)
    page = render_page(maps)
    assert page == render_page(maps)
    assert data_of(page)["source"] == [
        ["model", "made"],
        ["sha256", '{"model.safetensors": "ab"}'],
        ["seed", "7"],
    ]
    assert Elements(page).text_of("title") == "Attention: t0 t1 t2 t3 t4 t5"

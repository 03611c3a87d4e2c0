"""Pictures: what they draw is the tensors, what they say is true, and nothing else is touched."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
import torch
from example_maps import example_maps
from matplotlib.figure import Figure

from gpt2attn.analysis import Drift, entropy, over_queries, sink_share, uniform_weights
from gpt2attn.render.image import (
    drift_figure,
    figure_bytes,
    head_figure,
    maps_figure,
    maps_html,
    measures_figure,
    overview_figure,
)
from gpt2attn.render.look import BLUE, BROWN, pooled
from gpt2attn.render.sheet import plain

PNG = b"\x89PNG\r\n\x1a\n"
KINDS = {
    "head": {"layer": 1, "head": 2},
    "scores": {"layer": 1, "head": 2, "show": "scores"},
    "masked": {"layer": 1, "head": 2, "show": "masked"},
    "stages": {"layer": 1, "head": 2, "show": "stages"},
    "layer": {"layer": 1},
    "overview": {},
    "measures": {"show": "measures"},
}
WITH_LABELS = ("head", "scores", "masked", "stages", "layer")
HOSTILE = (
    "a\nb", "$x^2$", r"$\frac{", "<b>&amp;", "\0", "\u202eabc", "\ud83d", "\U0001f98a", "你",
    "-" * 80, "%s{}", "",
)  # fmt: skip
DRIFT = Drift(["wte", "wte + wpe", "block 0"], [1.0, 0.5, -0.25], [0.0, 0.25, 0.5])


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def drawn(figure: Figure) -> dict[str, np.ma.MaskedArray]:
    """The numbers behind each map of a figure, by its name."""
    (axes,) = figure.axes
    images = {image.get_label(): image.get_array() for image in axes.images}
    images.pop("bar", None)
    return images


def texts(figure: Figure) -> list[str]:
    (axes,) = figure.axes
    return [text.get_text() for text in axes.texts]


def svg_texts(figure: Figure) -> list[str]:
    root = ET.fromstring(figure_bytes(figure, "svg"))
    return ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]


def assert_drawn(found: np.ma.MaskedArray, weights: torch.Tensor) -> None:
    """The lower triangle of `weights`, and nothing above it."""
    n = len(weights)
    assert found.shape == (n, n)
    np.testing.assert_array_equal(np.ma.getmaskarray(found), ~np.tri(n, dtype=bool))
    np.testing.assert_array_equal(found.data[np.tri(n, dtype=bool)], weights.numpy()[np.tri(n) > 0])


@pytest.mark.parametrize("n_tokens", [6, 30, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_at_every_size(kind: str, n_tokens: int) -> None:
    figure = maps_figure(example_maps(n_tokens), **KINDS[kind])
    assert figure_bytes(figure, "png").startswith(PNG)
    found = svg_texts(figure)
    assert found == [text for text in texts(figure) if text]  # text, not outlines
    title, subtitle, *_ = found
    assert kind in ("overview", "measures") or "ayer 1" in title
    assert kind == "layer" or kind not in WITH_LABELS or "head 2" in title
    assert subtitle.startswith(f"a-model · {n_tokens} tokens")
    if kind in WITH_LABELS:
        assert {"query (reads)", "key (is read)"} <= set(found)
        steps = {6: 1, 30: 1 if kind in ("head", "scores", "masked") else 2}
        step = steps.get(n_tokens, 5 if kind in ("head", "scores", "masked") else 10)
        shown = [f"w{at}" if n_tokens <= 12 else f"{at} w{at}" for at in range(n_tokens)]
        assert set(shown[::step]) <= set(found)
        assert not set(found) & (set(shown) - set(shown[::step]))
        caption = " ".join(found)
        says = {1: "Labelled", 2: "every 2nd token", 5: "every 5th token", 10: "every 10th token"}
        assert (says[step] in caption) == (step > 1)


@pytest.mark.parametrize("n_tokens", [1, 2, 6, 30, 200])
def test_a_head_is_drawn_as_it_is(n_tokens: int) -> None:
    maps = example_maps(n_tokens)
    figure = maps_figure(maps, 1, 2)
    assert_drawn(drawn(figure)["1.2"], maps.head(1, 2))
    for stage in ("scores", "scaled"):
        found = drawn(maps_figure(maps, 1, 2, show=stage))["1.2"]
        assert not np.ma.is_masked(found)
        np.testing.assert_array_equal(found, maps.head(1, 2, stage=stage).numpy())
    assert_drawn(
        drawn(maps_figure(maps, 1, 2, show="masked"))["1.2"], maps.head(1, 2, stage="masked")
    )


@pytest.mark.parametrize(("n_tokens", "decimals"), [(2, 1), (6, 1), (30, 0)])
def test_numbers_in_cells_are_rounded_percentages(n_tokens: int, decimals: int) -> None:
    maps = example_maps(n_tokens)
    expected = [
        f"{100 * float(maps.head(1, 2)[query, key]):.{decimals}f}"
        for query in range(n_tokens)
        for key in range(query + 1)
    ]
    number = re.compile(r"\d+\.\d" if decimals else r"\d+")
    found = [text for text in texts(maps_figure(maps, 1, 2)) if number.fullmatch(text)]
    assert found == expected


def test_numbers_in_score_cells_have_the_decimals_that_fit() -> None:
    maps = example_maps(6)
    found = texts(maps_figure(maps, 1, 2, show="masked"))
    scores = maps.head(1, 2, stage="masked")
    assert found.count("-inf") == 15
    assert {
        f"{float(scores[query, key]):z.2f}" for query in range(6) for key in range(query + 1)
    } <= {*found}
    large = head_figure(scores * 1e5, maps.labels[0], layer=1, head=2, stage="masked")
    assert f"{float(scores[3, 1] * 1e5):z.0f}" in texts(large)


@pytest.mark.parametrize("n_tokens", [6, 30, 200])
def test_a_layer_and_all_heads_are_drawn_as_they_are(n_tokens: int) -> None:
    maps = example_maps(n_tokens)
    layer = drawn(maps_figure(maps, 1))
    assert list(layer) == ["1.0", "1.1", "1.2"]
    overview = drawn(maps_figure(maps))
    assert list(overview) == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    small, block = pooled(maps.weights, 172)  # 2.3 inches, two of 150 dots a cell
    assert block == (2 if n_tokens == 200 else 1)
    for head in range(3):
        assert_drawn(layer[f"1.{head}"], small[1, 0, head])
        # 180 dots a map: two tokens to a cell at 200.
        assert_drawn(overview[f"0.{head}"], pooled(maps.weights, 180)[0][0, 0, head])
    said = " ".join(texts(maps_figure(maps, 1)))
    assert ("2 x 2 tokens: what 2 queries, on average, give to 2 keys" in said) == (block == 2)
    assert ("2 x 2 tokens" in " ".join(texts(maps_figure(maps)))) == (block == 2)


def test_the_share_above_each_head_is_that_of_the_first_token() -> None:
    maps = example_maps(6)
    shares = over_queries(sink_share(maps.weights[1, 0]))
    found = texts(maps_figure(maps, 1))
    for head, share in enumerate(shares.tolist()):
        assert found[found.index(f"head {head}") + 1] == f"{share:.0%}"


def test_stages_stand_side_by_side() -> None:
    maps = example_maps(6)
    figure = maps_figure(maps, 1, 2, show="stages")
    found = drawn(figure)
    assert list(found) == ["scores", "scaled", "masked", "weights"]
    for stage in ("scores", "scaled"):
        np.testing.assert_array_equal(found[stage], maps.head(1, 2, stage=stage).numpy())
    for stage in ("masked", "weights"):
        assert_drawn(found[stage], maps.head(1, 2, stage=stage))
    images = {image.get_label(): image for image in figure.axes[0].images}
    # A score keeps its colour when others are masked.
    assert images["scaled"].get_clim() == images["masked"].get_clim()


def test_measures_are_those_of_the_analysis() -> None:
    maps = example_maps(30)
    weights = maps.weights[:, 0]
    figure = maps_figure(maps, show="measures")
    found = drawn(figure)
    shares, entropies = over_queries(sink_share(weights)), over_queries(entropy(weights))
    np.testing.assert_array_equal(found["sink share"], shares.numpy())
    np.testing.assert_array_equal(found["entropy"], entropies.numpy())
    assert {f"{100 * share:.0f}" for share in shares.flatten().tolist()} <= set(texts(figure))
    even = float(over_queries(entropy(uniform_weights(30))))
    assert f"{even:.2f} one that reads all" in " ".join(texts(figure))


def test_the_first_token_is_explained_where_it_takes_much() -> None:
    maps = example_maps(6)
    share = float(over_queries(sink_share(maps.head(1, 2))))
    said = " ".join(texts(maps_figure(maps, 1, 2)))
    assert f"The first token gets {share:.0%} of the attention" in said
    assert "would give it 29%" in said  # (1/2 + ... + 1/6) / 5
    assert "attention sink" in said
    even = head_figure(uniform_weights(6), maps.labels[0], layer=0, head=0)
    assert "The first token gets 29%" in " ".join(texts(even))
    assert "attention sink" not in " ".join(texts(even))


@pytest.mark.parametrize("most", [1, 3, 4, 7, 10, 11])
def test_pooled_maps_keep_their_meaning(most: int) -> None:
    weights = example_maps(10).weights.double()
    small, block = pooled(weights, most)
    starts = range(0, 10, block)
    assert small.shape[-1] == len(starts) <= most
    for i, query in enumerate(starts):
        for j, key in enumerate(starts):
            part = weights[..., query : query + block, key : key + block]
            torch.testing.assert_close(
                small[..., i, j].double(), part.sum(-1).mean(-1), rtol=1e-6, atol=1e-7
            )
    torch.testing.assert_close(small.sum(-1), torch.ones_like(small[..., 0]))
    assert not small.triu(1).any()


def test_masked_is_white_and_a_weight_of_zero_is_not() -> None:
    figure = head_figure(torch.eye(6), [*"abcdef"], layer=0, head=0)
    (image,) = (image for image in figure.axes[0].images if image.get_label() == "0.0")
    colours = image.to_rgba(image.get_array(), bytes=True)
    assert colours[0, 5].tolist() == [255, 255, 255, 255]
    assert colours[5, 0].tolist() == [*bytes.fromhex(BLUE[0][1:]), 255]
    assert colours[0, 0].tolist() == [*bytes.fromhex(BLUE[-1][1:]), 255]
    assert "White: masked" in " ".join(texts(figure))


@pytest.mark.parametrize("ramp", [BLUE, BROWN])
def test_ramps_are_even_in_lightness(ramp: tuple[str, ...]) -> None:
    def lightness(colour: str) -> float:
        """CIELAB L* of an sRGB colour."""
        parts = np.frombuffer(bytes.fromhex(colour[1:]), np.uint8) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return 116 * float(linear @ [0.2126, 0.7152, 0.0722]) ** (1 / 3) - 16

    steps = np.array([lightness(colour) for colour in ramp])
    np.testing.assert_allclose(steps, np.linspace(88, 20, len(ramp)), atol=0.5)


class TestWhatAPictureShows:
    def test_what_alone_was_captured_needs_no_naming(self) -> None:
        maps = example_maps(6, 1, 1)
        assert "layer 0, head 0" in texts(maps_figure(maps))[0]
        maps = replace(example_maps(6, 1, 3), layers=[7])
        assert "heads of layer 7" in texts(maps_figure(maps))[0]

    def test_numbers_of_layers_and_heads_are_the_models(self) -> None:
        maps = replace(example_maps(6), layers=[3, 9], heads=[2, 4, 11])
        assert list(drawn(maps_figure(maps, 9))) == ["9.2", "9.4", "9.11"]
        assert_drawn(drawn(maps_figure(maps, 9, 11))["9.11"], maps.weights[1, 0, 2])
        assert "9.11" in drawn(maps_figure(maps))

    def test_another_text_is_shown_without_its_padding(self) -> None:
        padded = torch.zeros(1, 2, 1, 6, 6)
        padded[0, 0, 0, 4:, 4:] = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
        padded[0, 1, 0] = uniform_weights(6)
        ids = [[0, 1], list(range(6))]
        labels = [["a", "b"], [*"cdefgh"]]
        maps = replace(
            example_maps(6, 1, 1),
            stages={"weights": padded}, ids=ids, labels=labels, prompt_lengths=[2, 4],
        )  # fmt: skip
        assert_drawn(drawn(maps_figure(maps))["0.0"], padded[0, 0, 0, 4:, 4:])
        assert_drawn(drawn(maps_figure(maps, text=-1))["0.0"], uniform_weights(6))
        assert "the last 2 generated" in texts(maps_figure(maps, text=1))[1]
        with pytest.raises(ValueError, match="no text 2"):
            maps_figure(maps, text=2)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"layer": 9}, "layer 9 was not captured"),
            ({"layer": 1, "head": 9}, "head 9 was not captured"),
            ({"head": 1}, "give the layer too"),
            ({"layer": 1, "head": 1, "show": "nothing"}, "'nothing' was not captured"),
            ({"layer": 1, "show": "stages"}, "a picture of one head"),
        ],
    )
    def test_what_is_not_there_is_refused(self, options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            maps_figure(example_maps(6), **options)

    def test_stages_that_were_not_captured(self) -> None:
        maps = example_maps(6)
        maps = replace(maps, stages={"weights": maps.weights})
        with pytest.raises(ValueError, match="'scores' was not captured"):
            maps_figure(maps, 1, 2, show="stages")

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "measures"])
    def test_one_token(self, kind: str) -> None:
        assert figure_bytes(maps_figure(example_maps(1), **KINDS[kind])).startswith(PNG)

    def test_one_token_has_no_measures(self) -> None:
        with pytest.raises(ValueError, match="two tokens or more"):
            maps_figure(example_maps(1), show="measures")

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_number_formats(self, dtype: torch.dtype) -> None:
        maps = example_maps(6)
        maps = replace(maps, stages={"weights": maps.weights.to(dtype)})
        assert_drawn(drawn(maps_figure(maps, 1, 2))["1.2"], maps.head(1, 2).float())
        for kind in ("layer", "overview", "measures"):
            assert drawn(maps_figure(maps, **KINDS[kind]))


class TestDrift:
    def test_curves_are_the_cosines(self) -> None:
        figure = drift_figure(DRIFT, "␣bank", ["One bank.", "Another bank."], source="a-model")
        (axes,) = figure.axes
        lines = {line.get_label(): line for line in axes.lines}
        ticks = {text.get_text(): text.get_position()[1] - 0.04 for text in axes.texts}
        zero, one = ticks["0.0"], ticks["1.0"]
        for name, cosines in (("␣bank", DRIFT.cosines), ("other pairs of tokens", DRIFT.others)):
            found = (lines[name].get_ydata() - zero) / (one - zero)
            np.testing.assert_allclose(found, cosines, atol=1e-6)
        assert {*DRIFT.stages, "1: One bank.", "2: Another bank."} <= set(svg_texts(figure))

    def test_without_others(self) -> None:
        figure = drift_figure(replace(DRIFT, others=None), "$x\n")
        assert len(figure.axes[0].lines) == 1
        assert "$x<U+000A> in two texts, layer by layer" in svg_texts(figure)


def test_right_to_left_letters_turn_nothing_around_them() -> None:
    """Unmarked, a position moves behind its token, and the bytes of the next one are mixed up."""
    assert plain("␣מ<0xD7>") == "␣\u200eמ\u200e<0xD7>"
    assert plain("␣a<0xD7>") == "␣a<0xD7>"


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_labels_are_drawn_as_text(kind: str) -> None:
    maps = example_maps(len(HOSTILE), labels=HOSTILE)
    maps.metadata["model"] = "../<m>\n$a_1$\u202e" + "x" * 300
    figure = maps_figure(maps, **KINDS[kind])
    assert figure_bytes(figure, "png").startswith(PNG)
    found = svg_texts(figure)
    if kind in WITH_LABELS:
        shown = (
            "a<U+000A>b", "$x^2$", r"$\frac{", "<b>&amp;", "<U+0000>", "<U+202E>abc", "<U+D83D>",
            "<U+1F98A>", "<U+4F60>", "%s{}",
        )  # fmt: skip
        assert set(shown) <= set(found)
    assert found[1].startswith("../<m><U+000A>$a_1$<U+202E>")
    assert figure.get_figwidth() < 20


def test_the_same_bytes_every_time_whatever_the_user_has_set() -> None:
    def both() -> tuple[bytes, ...]:
        figure = maps_figure(example_maps(6), 1, 2)
        return figure_bytes(figure, "png"), figure_bytes(figure, "svg"), figure_bytes(figure, "png")

    first = both()
    assert first[0] == first[2]
    assert not re.search(rb"<dc:date>|Matplotlib v", first[1])
    user = {
        "font.size": 30, "axes.facecolor": "black", "svg.fonttype": "path", "savefig.dpi": 10,
        "figure.facecolor": "red", "text.parse_math": True, "image.cmap": "jet",
    }  # fmt: skip
    with matplotlib.rc_context(user):
        before = dict(matplotlib.rcParams)
        assert both() == first
        assert dict(matplotlib.rcParams) == before


def test_threads_leave_the_settings_alone() -> None:
    before = dict(matplotlib.rcParams)
    maps = example_maps(6)
    with ThreadPoolExecutor(4) as pool:
        pictures = list(pool.map(lambda _: figure_bytes(maps_figure(maps, 1, 2)), range(8)))
    assert len(set(pictures)) == 1
    assert dict(matplotlib.rcParams) == before


def test_pyplot_is_never_imported() -> None:
    program = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from example_maps import example_maps\n"
        "import gpt2attn.render\n"
        "print('matplotlib' in sys.modules)\n"
        "from gpt2attn.render import image\n"
        "image.figure_bytes(image.maps_figure(example_maps(6)), 'svg')\n"
        "image.maps_html(example_maps(6))\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    root = __file__.rsplit("tests", 1)[0]
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root
    )
    assert result.stdout.split() == ["False", "False"], result.stderr


def test_only_png_and_svg() -> None:
    with pytest.raises(ValueError, match="png or an svg file, not 'pdf'"):
        figure_bytes(maps_figure(example_maps(2)), "pdf")


class TestNotebook:
    def test_the_picture_is_in_the_element(self) -> None:
        maps = example_maps(6)
        html = maps_html(maps)
        data = re.search(r'src="data:image/png;base64,([^"]+)"', html)[1]
        assert base64.b64decode(data) == figure_bytes(maps_figure(maps))
        assert "http" not in html.replace(data, "")
        assert "Text 0" not in html

    def test_several_texts(self) -> None:
        maps = example_maps(6)
        both = replace(
            maps,
            stages={"weights": torch.cat([maps.weights, maps.weights], 1)},
            ids=maps.ids * 2, labels=maps.labels * 2, prompt_lengths=[6, 6],
        )  # fmt: skip
        assert "Text 0 of 2" in maps_html(both)

    def test_no_weights_no_picture(self) -> None:
        maps = example_maps(6)
        assert maps_html(replace(maps, stages={"scores": maps.stage("scores")})) is None

    def test_a_figure_shows_itself(self) -> None:
        figure = measures_figure(torch.rand(2, 3), torch.rand(2, 3), n_tokens=6)
        assert figure._repr_png_() == figure_bytes(figure)


@pytest.mark.slow
def test_a_full_context_of_all_heads() -> None:
    weights = example_maps(1024, 1, 2).weights[:, 0].expand(12, 2, 1024, 1024)
    figure = overview_figure(weights, [f"w{at}" for at in range(1024)])
    assert_drawn(drawn(figure)["11.1"], pooled(weights[11, 1], 180)[0])
    assert "6 x 6 tokens" in " ".join(texts(figure))
    assert figure_bytes(figure).startswith(PNG)

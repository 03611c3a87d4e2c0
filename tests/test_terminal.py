"""Maps in a terminal: right numbers, right shades, and nothing that the terminal cannot show."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from example_maps import example_maps
from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from gpt2attn.render.look import pooled
from gpt2attn.render.terminal import RAMP, Screen, head_text, maps_text

KINDS = {"head": (1, 2), "layer": (1,), "overview": ()}
SCREENS = [Screen(80), Screen(120), Screen(100, utf8=False), Screen(100, color=True), Screen(40)]
HOSTILE = (
    "a\nb", "\0\x1b[31m", "[red]b[/]", ":smile:", "\u202eabc", "\ud83d", "\U0001f98a", "你好",
    "-" * 80, "e\u0301", "␣␣x", "",
)  # fmt: skip


def printed(text: Text, screen: Screen) -> str:
    """What a console of that screen writes, escape codes included."""
    file = io.StringIO()
    Console(
        file=file, width=screen.width, highlight=False,
        force_terminal=screen.color, color_system="truecolor" if screen.color else None,
    ).print(text, end="", soft_wrap=True)  # fmt: skip
    return file.getvalue()


def cells(text: Text, row: str) -> list[str]:
    """The numbers in the table row that begins with `row`."""
    (line,) = (line for line in text.plain.splitlines() if line.startswith(row))
    return re.findall(r"\d+(?:\.\d)?", line.removeprefix(row))


def shade(weight: float, shades: str = "·░▒▓█") -> str:
    return shades[np.searchsorted([1 / 64, 9 / 64, 25 / 64, 49 / 64], weight)]


def color(weight: float) -> tuple[int, ...]:
    ramp = np.array([list(bytes.fromhex(step[1:])) for step in RAMP])
    at = np.linspace(0, 1, len(RAMP))
    return tuple(round(np.interp(weight**0.5, at, ramp[:, part])) for part in range(3))


def styled(text: Text) -> list[list[tuple[str, Style]]]:
    """Each line as (character, style) pairs."""
    console = Console(force_terminal=True, color_system="truecolor", width=200)
    return [
        [
            (char, segment.style)
            for segment in line
            for char in segment.text
        ]
        for line in console.render_lines(text, pad=False)
    ]  # fmt: skip


def rgb(color: Color) -> tuple[int, ...]:
    return tuple(color.get_truecolor())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_tokens", [1, 6, 30, 200])
@pytest.mark.parametrize("screen", SCREENS, ids=str)
def test_everything_fits_every_screen(kind: str, n_tokens: int, screen: Screen) -> None:
    text = maps_text(example_maps(n_tokens), *KINDS[kind], screen=screen)
    lines = text.plain.splitlines()
    assert max(cell_len(line) for line in lines) <= screen.width
    assert lines[0].startswith("Attention of ")
    assert f"{n_tokens} token" in lines[1]
    output = printed(text, screen)
    assert ("\x1b" in output) == screen.color
    assert output.isascii() or screen.utf8
    if not screen.color:
        assert output == text.plain


@pytest.mark.parametrize("screen", [Screen(80), Screen(80, True), Screen(80, utf8=False)], ids=str)
def test_a_small_table_has_every_percentage(screen: Screen) -> None:
    maps = example_maps(6)
    weights = maps.head(1, 2)
    text = maps_text(maps, 1, 2, screen=screen)
    for query in range(6):
        expected = [f"{100 * share:.1f}" for share in weights[query, : query + 1].tolist()]
        assert cells(text, f"{query} w{query} ") == expected
    assert re.search(r"^ +w0 +w1 +w2 +w3 +w4 +w5$", text.plain, re.MULTILINE)
    assert "Too wide" not in text.plain


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("n_tokens", [30, 200])
def test_a_wide_table_sums_up_what_it_leaves_out(n_tokens: int, width: int) -> None:
    maps = example_maps(n_tokens)
    weights = maps.head(1, 2)
    text = maps_text(maps, 1, 2, screen=Screen(width))
    (heading,) = (line for line in text.plain.splitlines() if line.lstrip().startswith("0    …"))
    first, between, *last = heading.split()
    shown = [int(key) for key in last]
    assert (first, between) == ("0", "…")
    assert shown == list(range(n_tokens - len(shown), n_tokens))
    assert len(shown) > (width - 20) // 6
    for query in shown:
        row = weights[query].tolist()
        shares = [row[0], sum(row[1 : shown[0]]), *row[shown[0] : query + 1]]
        assert cells(text, f"{query} w{query} ") == [f"{100 * share:.0f}" for share in shares]
    said = " ".join(text.plain.split())
    assert f"of {n_tokens} tokens, the first and the last {len(shown)} are here" in said
    assert f"the sum over the {shown[0] - 1} between them" in said


def test_a_narrow_table_that_fits_is_whole() -> None:
    text = maps_text(example_maps(16), 1, 2, screen=Screen(100))
    assert "Too wide" not in text.plain
    assert len(cells(text, "15 w15 ")) == 16


@pytest.mark.parametrize(
    ("screen", "shades"), [(Screen(80), "·░▒▓█"), (Screen(80, utf8=False), ".:+*#")]
)
def test_shades_follow_the_weight(screen: Screen, shades: str) -> None:
    maps = example_maps(6)
    text = maps_text(maps, 1, 2, screen=screen)
    for query in range(6):
        (line,) = (
            line for line in text.plain.splitlines() if line.startswith(f"{query} w{query} ")
        )
        row = maps.head(1, 2)[query, : query + 1].tolist()
        assert line[-1] == shade(row[-1], shades)
        found = re.findall(rf"\d+\.\d([{re.escape(shades)}])", line)
        assert found == [shade(share, shades) for share in row]
    for step, least in zip("░▒▓█", ("2%", "14%", "39%", "77%"), strict=True):
        mark = step if screen.utf8 else shades["·░▒▓█".index(step)]
        assert f"{mark} from {least}" in " ".join(text.plain.split())


def test_a_cell_has_the_colour_of_its_weight() -> None:
    maps = example_maps(6)
    lines = styled(maps_text(maps, 1, 2, screen=Screen(80, color=True)))
    rows = [line for line in lines if re.match(r"\d w\d ", "".join(char for char, _ in line))]
    for query, line in enumerate(rows):
        painted = [style for char, style in line if style.bgcolor]
        weights = maps.head(1, 2)[query, : query + 1].tolist()
        expected = [color(share) for share in weights for _ in range(8)]
        np.testing.assert_allclose([rgb(s.bgcolor) for s in painted], expected, atol=1)


def test_half_blocks_show_two_rows_a_line() -> None:
    """Read back from characters and colours, each small map is the weights, and blank above."""
    maps = example_maps(6)
    lines = styled(maps_text(maps, screen=Screen(100, color=True)))
    starts = [i for i, line in enumerate(lines) if re.match(r"\d ", "".join(c for c, _ in line))]
    for layer, start in enumerate(starts):
        for head in range(3):
            weights = maps.head(layer, head)
            left = 6 + 8 * head
            for query in range(6):
                line = lines[start + query // 2]
                for key in range(query + 1):
                    char, style = line[left + key]
                    upper = query % 2 == 0
                    assert char == ("▀" if key <= query // 2 * 2 else "▄")
                    painted = style.bgcolor if not upper and char == "▀" else style.color
                    expected = color(float(weights[query, key]))
                    np.testing.assert_allclose(rgb(painted), expected, atol=1)
                blank = "".join(char for char, _ in line[left + query // 2 * 2 + 2 : left + 6])
                assert not blank.strip()


@pytest.mark.parametrize("utf8", [True, False])
def test_characters_show_two_rows_averaged(utf8: bool) -> None:
    maps = example_maps(6)
    text = maps_text(maps, screen=Screen(100, utf8=utf8))
    lines = text.plain.splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith("1 "))
    for head in range(3):
        weights, left = maps.head(1, head), 6 + 8 * head
        for pair in range(3):
            rows = weights[2 * pair : 2 * pair + 2]
            means = rows.mean(0)
            means[2 * pair + 1] = rows[1, 2 * pair + 1]  # which only the second row sees
            expected = [shade(float(mean), "·░▒▓█" if utf8 else ".:+*#") for mean in means]
            found = lines[start + pair].ljust(100)[left : left + 6]
            assert found == "".join(expected[: 2 * pair + 2]).ljust(6)
    assert "two rows, averaged" in text.plain


@pytest.mark.parametrize("screen", [Screen(100), Screen(100, True), Screen(80)], ids=str)
@pytest.mark.parametrize("n_tokens", [6, 200])
def test_144_heads(screen: Screen, n_tokens: int) -> None:
    maps = example_maps(n_tokens, 12, 12)
    lines = maps_text(maps, screen=screen).plain.splitlines()
    (names,) = (line for line in lines if line.startswith("layer "))
    assert names.split() == ["layer", *(str(head) for head in range(12))]
    starts = [line.split()[0] for line in lines if re.match(r"\d+ +[▀·░▒▓█]", line)]
    assert starts == [str(layer) for layer in range(12)]
    assert max(len(line) for line in lines) <= screen.width
    assert len(lines) < 80
    said = " ".join(" ".join(lines).split())
    block = pooled(maps.weights, (screen.width - 6) // 12 - 1)[1]
    assert (f"{block} x {block} tokens" in said) == (block > 1)


def test_heads_that_do_not_fit_stand_in_further_bands() -> None:
    lines = maps_text(example_maps(6, 2, 25), screen=Screen(80)).plain.splitlines()
    names = [line.split()[1:] for line in lines if line.startswith("layer ")]
    assert [int(name) for band in names for name in band] == list(range(25))
    assert len(names) == 2
    assert sum(line.startswith("1 ") for line in lines) == 2


def test_a_layer_names_heads_and_their_first_tokens_share() -> None:
    maps = replace(example_maps(6), layers=[3, 9], heads=[2, 4, 11])
    text = maps_text(maps, 9, screen=Screen(80))
    assert "heads of layer 9" in text.plain.splitlines()[0]
    (names,) = (line for line in text.plain.splitlines() if line.startswith("head "))
    shares = maps.weights[1, 0, :, 1:, 0].mean(-1).tolist()
    expected = [part for head, share in zip((2, 4, 11), shares, strict=True)
                for part in ("head", str(head), f"{share:.0%}")]  # fmt: skip
    assert names.split() == expected


@pytest.mark.parametrize("screen", SCREENS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_labels_stay_on_their_line(screen: Screen, kind: str) -> None:
    maps = example_maps(len(HOSTILE), labels=HOSTILE)
    maps.metadata["model"] = "m\n\x1b]0;title\a[b]" + "x" * 200
    text = maps_text(maps, *KINDS[kind], screen=screen)
    plain = maps_text(example_maps(len(HOSTILE)), *KINDS[kind], screen=screen)
    assert all(char.isprintable() for char in text.plain.replace("\n", ""))
    if kind != "head":  # a table loses columns to long labels
        assert text.plain.count("\n") == plain.plain.count("\n")
    assert max(cell_len(line) for line in text.plain.splitlines()) <= screen.width
    assert text.plain.isascii() or screen.utf8
    assert "m<U+000A><U+001B>]0;title<U+0007>[b]"[: screen.width - 1] in text.plain
    if kind == "head" and screen.width >= 80:
        assert "[red]b[/]" in printed(text, screen)


def test_without_utf8_a_space_mark_is_an_underscore() -> None:
    maps = example_maps(3, labels=["␣a", "⏎", "⇥"])
    lines = maps_text(maps, 0, 0, screen=Screen(utf8=False)).plain.splitlines()
    assert [line.split()[:2] for line in lines[4:7]] == [["0", "_a"], ["1", r"\n"], ["2", r"\t"]]


@pytest.mark.parametrize(
    ("options", "screen"),
    [
        ({"color_system": "truecolor"}, Screen(90, True, True)),
        ({"color_system": "256"}, Screen(90, True, True)),
        ({"color_system": "standard"}, Screen(90, False, True)),
        ({"color_system": None}, Screen(90, False, True)),
        ({"color_system": "truecolor", "no_color": True}, Screen(90, False, True)),
    ],
)
def test_a_screen_is_what_the_console_can_do(options: dict, screen: Screen) -> None:
    file = io.TextIOWrapper(io.BytesIO(), "utf-8")
    assert Screen.of(Console(file=file, width=90, force_terminal=True, **options)) == screen
    file = io.TextIOWrapper(io.BytesIO(), "latin-1")
    console = Console(file=file, width=90, force_terminal=True, **options)
    assert Screen.of(console) == replace(screen, utf8=False)


def test_what_is_not_there_is_refused() -> None:
    maps = example_maps(6)
    for place, message in (((9,), "layer 9 was not"), ((None, 1), "give the layer too")):
        with pytest.raises(ValueError, match=message):
            maps_text(maps, *place, screen=Screen())
    with pytest.raises(ValueError, match="no text 1"):
        maps_text(maps, text=1, screen=Screen())


def test_a_weight_of_zero_is_not_blank() -> None:
    text = head_text(torch.eye(3), ["a", "b", "c"], layer=0, head=0, screen=Screen())
    assert "2 c     0.0·    0.0·  100.0█\n" in text.plain
    assert "0 a   100.0█\n" in text.plain

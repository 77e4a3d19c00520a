"""The common parts of all figures: colours, sizes, rows, legends, and the conversion to SVG and PNG.

An algorithm has the same colour in every figure. A figure is drawn once, with the light colours. The copy on the page
has CSS variables instead, so that it follows the page's dark theme. SVG and PNG files keep the light colours.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testbed.report.sentences import check_sentence
from testbed.spec.mode import ALGORITHMS, USER_METHOD

matplotlib.use("Agg")

# name: (light, dark). The colours of an algorithm are in its row of ALGORITHMS.
COLOURS: dict[str, tuple[str, str]] = {
    "ink": ("#1c2430", "#e6eaf0"),
    "muted": ("#5a6675", "#9aa6b6"),
    "grid": ("#dfe3e9", "#343d4a"),
    "card": ("#fffffe", "#1a212b"),
    "compute": ("#9fb4cf", "#5d7ca6"),
    "exposed": ("#b5284e", "#f2718f"),
    "data": ("#d8cfb8", "#857a5c"),
    "forward": ("#bccbe0", "#7f9cc4"),
    "backward": ("#93abcb", "#5c7dae"),
    "update": ("#5f7da8", "#3f5d8a"),
    "copies": ("#7a5c9e", "#b198d8"),
    "rest": ("#b9bfc8", "#5d6775"),
    "bound": ("#39434f", "#c9d1db"),
    "own": USER_METHOD.colour,
    **{name: row.colour for name, row in ALGORITHMS.items()},
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
WIDTH_INCHES = 5.4  # the same for all figures, so that their text has one size on the page
TITLE_INCHES = 0.52  # above the axes, for the finding; cut off on the page, which prints the finding as text
ROW_INCHES = 0.42  # per bar

plt.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": COLOURS["muted"][0],
        "axes.labelcolor": COLOURS["ink"][0],
        "axes.facecolor": COLOURS["card"][0],
        "figure.facecolor": COLOURS["card"][0],
        "savefig.facecolor": COLOURS["card"][0],
        "text.color": COLOURS["ink"][0],
        "xtick.color": COLOURS["muted"][0],
        "ytick.color": COLOURS["muted"][0],
        "xtick.labelcolor": COLOURS["ink"][0],
        "ytick.labelcolor": COLOURS["ink"][0],
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": COLOURS["grid"][0],
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.8,
        "lines.markersize": 6,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "hatch.color": COLOURS["exposed"][0],
        "hatch.linewidth": 1.4,
        "svg.fonttype": "none",
        "text.parse_math": False,  # run folders may come from other users: a dollar sign must not start a formula
        "path.simplify": True,
    }
)


@dataclass
class Canvas:
    """A figure with one axes below the space for the title. `tips`: the texts that appear under the pointer."""

    figure: Figure
    axes: Axes
    tips: dict[str, str] = field(default_factory=dict)

    def tip(self, artist: Any, text: str) -> None:
        """Show `text` while the pointer is over an artist."""
        key = f"tip{len(self.tips)}"
        artist.set_gid(key)
        self.tips[key] = text


@dataclass(frozen=True)
class Plot:
    """One figure: the name of its files, the finding that is its title, a note on how to read it, and the drawings.

    A drawing is made when it is first used, because drawing takes most of the time of a report.
    """

    name: str
    finding: str
    note: str
    made: Canvas

    @cached_property
    def svg(self) -> str:
        """The drawing for a file."""
        text = io.StringIO()
        with plt.rc_context({"svg.hashsalt": self.name}):
            self.made.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        return _with_tips(text.getvalue(), self.made.tips)

    @cached_property
    def inline(self) -> str:
        """The drawing for the page."""
        return _inline(self.svg, self.name, self.finding, self.made.figure.get_size_inches()[1])

    @cached_property
    def png(self) -> bytes:
        image = io.BytesIO()
        self.made.figure.savefig(image, format="png", dpi=120, pil_kwargs={"compress_level": 4})
        return image.getvalue()

    def _repr_svg_(self) -> str:
        """Return the SVG that a notebook shows."""
        return self.svg


def canvas(
    height: float = 3.5, left: float = 0.7, bottom: float = 0.62, right: float = 0.15, top: float = 0.12
) -> Canvas:
    """Return an empty figure. Sizes and margins are in inches."""
    whole = height + TITLE_INCHES
    figure = Figure(figsize=(WIDTH_INCHES, whole))
    box = (
        left / WIDTH_INCHES,
        bottom / whole,
        1 - (left + right) / WIDTH_INCHES,
        1 - (bottom + top + TITLE_INCHES) / whole,
    )
    return Canvas(figure, figure.add_axes(box))


def colour(algorithm: str) -> str:
    """Return the colour of an algorithm, which is the same in every figure."""
    return COLOURS.get(algorithm, COLOURS["own"])[0]


def rows(algorithms: Sequence[str], names: Sequence[str], per_row: float = ROW_INCHES, extra: float = 1.25) -> Canvas:
    """Return a canvas with horizontal rows whose names have the colours of these algorithms."""
    made = strips(names, per_row, extra)
    for tick, algorithm in zip(made.axes.get_yticklabels(), algorithms, strict=True):
        tick.set_color(colour(algorithm))
        tick.set_fontweight("bold")
    return made


def strips(names: Sequence[str], per_row: float, extra: float) -> Canvas:
    """Return a canvas with horizontal rows, the first on top, and their names at the left."""
    longest = max(len(name) for name in names)
    small = longest > 26
    left = 0.25 + (0.072 if small else 0.09) * longest
    made = canvas(extra + per_row * len(names), left=min(left, 2.6))
    made.axes.set_yticks(range(len(names)), names, fontsize=8 if small else 10)
    made.axes.set_ylim(len(names) - 0.45, -0.55)
    made.axes.tick_params(axis="y", length=0)
    made.axes.grid(axis="y", visible=False)
    made.axes.spines["left"].set_visible(False)
    return made


def legend_below(made: Canvas, keys: Sequence[Artist]) -> None:
    """Add a legend below the axes, and make the axes smaller."""
    columns = 2 if sum(len(str(key.get_label())) + 6 for key in keys) > 95 else 3
    style = {"ncols": columns, "columnspacing": 1.2, "handlelength": 1.4, "labelspacing": 0.3}
    made.figure.legend(handles=list(keys), loc="lower left", bbox_to_anchor=(0.0, -0.01), **style)
    box, lift = made.axes.get_position(), (0.14 + 0.19 * -(-len(keys) // columns)) / made.figure.get_size_inches()[1]
    made.axes.set_position((box.x0, box.y0 + lift, box.width, box.height - lift))


def legend_above(made: Canvas) -> None:
    """Add a legend above the axes, and make the axes smaller."""
    names = made.axes.get_legend_handles_labels()[1]
    columns = max(1, min(len(names), int(58 / (max(map(len, names)) + 7))))
    lines = -(-len(names) // columns)
    box, drop = made.axes.get_position(), 0.2 * lines / made.figure.get_size_inches()[1]
    made.axes.set_position((box.x0, box.y0, box.width, box.height - drop))
    style = {"ncols": columns, "columnspacing": 1.3, "handlelength": 2.0, "borderaxespad": 0.2}
    made.axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), **style)


def plot(made: Canvas, name: str, finding: str, note: str = "") -> Plot:
    """Add the title and return the Plot. `name` is the prefix of all ids in it, so that two figures share no id.

    Raise TypeError if no registered rule made the finding (report/sentences.py).
    """
    check_sentence(finding)
    height = made.figure.get_size_inches()[1]
    title = "\n".join(textwrap.wrap(finding, 64)[:2])
    made.figure.text(0.012, 1 - 0.09 / height, title, fontsize=10.2, fontweight="bold", va="top", gid="title")
    return Plot(name, finding, note, made)


def _with_tips(svg: str, tips: dict[str, str]) -> str:
    for key, text in tips.items():
        svg = svg.replace(f'<g id="{key}">', f'<g id="{key}"><title>{html.escape(text)}</title>', 1)
    return svg


def _inline(svg: str, name: str, finding: str, height: float) -> str:
    """Return the copy for the page: no XML prologue, no title, no fixed size, CSS variables for colours, unique ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'<g id="title">.*?</g>', "", svg, flags=re.S)
    box = f'viewBox="0 {TITLE_INCHES * 72:g} {WIDTH_INCHES * 72:g} {(height - TITLE_INCHES) * 72:g}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box} role="img" '
    opening += f'aria-label="{html.escape(finding)}">'
    # A function as replacement, because a finding may contain a backslash.
    svg = re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)
    prefix = re.sub(r"[^a-z0-9]+", "-", name.lower())
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    names = {light: key for key, (light, _) in COLOURS.items()}
    return re.sub(r"#[0-9a-f]{6}\b", lambda m: f"var(--{names[m[0]]})" if m[0] in names else m[0], svg)


def css(dark: bool) -> str:
    """Return the colours as CSS variables."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLOURS.items())

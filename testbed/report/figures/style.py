"""How plots look: one colour per method everywhere, safe for colour-blind eyes, light and dark from one drawing.

A plot is drawn once with the light colours. The page's copy names CSS variables instead, so that it turns dark with the
page; the exported SVG and PNG keep the light ones.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testbed.spec.mode import ALGORITHMS, OWN

matplotlib.use("Agg")

# name: (light, dark); an algorithm's are in its row.
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
    "rest": ("#b9bfc8", "#5d6775"),
    "bound": ("#39434f", "#c9d1db"),
    "own": OWN.colour,
    **{name: row.colour for name, row in ALGORITHMS.items()},
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
WIDTH = 5.4  # inches; all plots are as wide, so that their text is of one size on the page
TITLE = 0.52  # inches above the plot for the finding; cut off on the page, which prints it itself

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
        "text.parse_math": False,  # dollars in a stranger's words are dollars
        "path.simplify": True,
    }
)


@dataclass(frozen=True)
class Plot:
    """One drawn plot: its file name, the finding that is its title, what to know when reading it, and the drawings."""

    name: str
    finding: str
    note: str
    svg: str  # for a file
    inline: str  # for the page
    png: bytes

    def _repr_svg_(self) -> str:
        """Notebooks show the figure."""
        return self.svg


@dataclass
class Canvas:
    """A figure with one axes under room for the title; `tips` are what the pointer shows over a part."""

    figure: Figure
    axes: Axes
    tips: dict[str, str] = field(default_factory=dict)

    def tip(self, artist: Any, text: str) -> None:
        """Show `text` where the pointer rests on an artist."""
        key = f"tip{len(self.tips)}"
        artist.set_gid(key)
        self.tips[key] = text


def canvas(
    height: float = 3.5, left: float = 0.7, bottom: float = 0.62, right: float = 0.15, top: float = 0.12
) -> Canvas:
    """An empty plot; margins in inches."""
    whole = height + TITLE
    figure = Figure(figsize=(WIDTH, whole))
    place = (left / WIDTH, bottom / whole, 1 - (left + right) / WIDTH, 1 - (bottom + top + TITLE) / whole)
    return Canvas(figure, figure.add_axes(place))


def colour(algorithm: str) -> str:
    """A method's colour, the same in every plot."""
    return COLOURS.get(algorithm, COLOURS["own"])[0]


def plot(made: Canvas, name: str, finding: str, note: str = "") -> Plot:
    """Save a canvas; `name` salts the ids so that no two plots of a page share one."""
    size = made.figure.get_size_inches()
    title = "\n".join(textwrap.wrap(finding, 64)[:2])
    made.figure.text(0.012, 1 - 0.09 / size[1], title, fontsize=10.2, fontweight="bold", va="top", gid="title")
    with plt.rc_context({"svg.hashsalt": name}):
        text = io.StringIO()
        made.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        image = io.BytesIO()
        made.figure.savefig(image, format="png", dpi=120, pil_kwargs={"compress_level": 4})
    svg = _with_tips(text.getvalue(), made.tips)
    return Plot(name, finding, note, svg, _inline(svg, name, finding, size[1]), image.getvalue())


def _with_tips(svg: str, tips: dict[str, str]) -> str:
    for key, text in tips.items():
        svg = svg.replace(f'<g id="{key}">', f'<g id="{key}"><title>{html.escape(text)}</title>', 1)
    return svg


def _inline(svg: str, name: str, finding: str, height: float) -> str:
    """For the page: no XML prologue, no title, no fixed size, CSS variables for colours, ids of its own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'<g id="title">.*?</g>', "", svg, flags=re.S)
    box = f'viewBox="0 {TITLE * 72:g} {WIDTH * 72:g} {(height - TITLE) * 72:g}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box} role="img" '
    opening += f'aria-label="{html.escape(finding)}">'
    svg = re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)  # no template: a stranger's \042 would be a quote
    prefix = re.sub(r"[^a-z0-9]+", "-", name.lower())
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    names = {light: key for key, (light, _) in COLOURS.items()}
    return re.sub(r"#[0-9a-f]{6}\b", lambda m: f"var(--{names[m[0]]})" if m[0] in names else m[0], svg)


def css(dark: bool) -> str:
    """The colours as CSS variables."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLOURS.items())

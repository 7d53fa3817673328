"""Matplotlib without its global state: a figure drawn for a laptop and for a phone, in a light and a dark palette."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semkv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, SURFACE = "#1b2026", "#5a6470", "#d8dde2", "#fefefe"
SERIES = ("#0b68c7", "#c2430d", "#16803c", "#8a3ab5", "#9a6206", "#bd1a5e")
# The same picture in the dark: its colors are exchanged in the finished SVG, so both are drawn from the same data.
_DARK = {
    INK: "#e7eaee", MUTED: "#a0aab5", GRID: "#363e48", SURFACE: "#161a20",
    "#0b68c7": "#62b0ff", "#c2430d": "#ff9d66", "#16803c": "#52d685", "#8a3ab5": "#cf9bf5", "#9a6206": "#e3be6a",
    "#bd1a5e": "#ff80ba",
}  # fmt: skip
# Text on a heat map's cell, whose color is the same in both palettes.
ON_LIGHT, ON_DARK = "#0a0a0a", "#fafafa"
MARKERS = "osD^vPX*"

_PNG_DPI = 150


@dataclass(frozen=True)
class Layout:
    """How wide a figure is drawn: inches, and whether panels stand side by side."""

    width: float
    wide: bool

    def height(self, wide: float, narrow: float) -> float:
        return wide if self.wide else narrow


WIDE, NARROW = Layout(10.6, True), Layout(4.4, False)


@dataclass(frozen=True)
class Drawing:
    """A finished figure.

    Attributes:
        name: a file name without suffix.
        title, caption: what it shows, and how to read it.
        svg: by ``(wide, dark)``.
        png: for a laptop, light.
    """

    name: str
    title: str
    caption: str
    svg: dict[tuple[bool, bool], str]
    png: bytes


Draw = Callable[["Figure", Layout], None]


def render(name: str, title: str, caption: str, draw: Draw) -> Drawing:
    """Draw a figure for both widths; equal data gives equal bytes.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ConfigError("semkv report", "matplotlib", "to be installed: pip install 'semkv[report]'") from e
    svg, png = {}, b""
    for layout in (WIDE, NARROW):
        with mpl.rc_context(_style(layout)):
            figure = Figure(figsize=(layout.width, 4), layout="constrained")
            draw(figure, layout)
            FigureCanvasSVG(figure)
            text = io.StringIO()
            figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            light = text.getvalue()
            svg[layout.wide, False], svg[layout.wide, True] = light, _darkened(light)
            if layout.wide:
                FigureCanvasAgg(figure)
                data = io.BytesIO()
                figure.savefig(data, format="png", dpi=_PNG_DPI, facecolor="white", metadata={"Software": None})
                png = data.getvalue()
    return Drawing(name, title, caption, svg, png)


def _darkened(svg: str) -> str:
    for light, dark in _DARK.items():
        svg = svg.replace(light, dark)
    return svg


def _style(layout: Layout) -> Any:
    size = 9.5 if layout.wide else 10.0
    return {
        "svg.hashsalt": "semkv",
        "svg.fonttype": "path",
        "font.family": "DejaVu Sans",
        "font.size": size,
        "axes.titlesize": size + 0.5,
        "axes.titlelocation": "left",
        "axes.labelsize": size,
        "xtick.labelsize": size - 0.5,
        "ytick.labelsize": size - 0.5,
        "legend.fontsize": size - 0.5,
        "legend.frameon": False,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.edgecolor": MUTED,
        "axes.facecolor": "none",
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }


def panels(figure: Figure, layout: Layout, count: int, height: tuple[float, float]) -> list[Axes]:
    """So many panels, side by side or one below the other; ``height`` of a panel in inches, wide and narrow."""
    columns = min(count, 3) if layout.wide else 1
    rows = -(-count // columns)
    figure.set_size_inches(layout.width, rows * layout.height(*height))
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = list(grid.ravel())
    for unused in axes[count:]:
        unused.set_axis_off()
    return axes[:count]

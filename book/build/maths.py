"""TeX formulas to inline SVG, at build time: nothing is left for the reader's browser to do.

KaTeX, run in an embedded JavaScript engine, turns TeX into MathML and is strict about mistakes; ziamath sets the
MathML with its own font and gives SVG. Every glyph becomes a symbol, so that a page draws it once and each
formula only points at it. Results are kept in a cache folder under the hash of their source.
"""

import hashlib
import html
import json
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

VERSION = 7  # raise it when the output changes, so that old cache entries are not used
FONT_SIZE = 20  # of the drawing, in its own units; the page scales by em, so the value hardly matters
SIZE_COMMANDS = re.compile(r"\\(?:Huge|huge|LARGE|Large|large|normalsize|small|footnotesize|tiny)\b ?")

SYMBOL = re.compile(r'<symbol id="([^"]+)".*?</symbol>', re.S)


class BadFormula(ValueError):
    """TeX that KaTeX refuses; the message is KaTeX's own, on one line."""


@dataclass(frozen=True)
class Drawing:
    """One formula: its box in em (depth is what hangs below the baseline), its glyphs by id, its body."""

    width: float
    height: float
    depth: float
    view_box: str
    body: str
    symbols: dict[str, str] = field(hash=False)


@cache
def katex():
    """The KaTeX function of an embedded JavaScript engine: (tex, display) -> HTML as a JSON string."""
    import quickjs

    engine = quickjs.Context()
    engine.eval((files("sphinxcontrib") / "katex.min.js").read_text(encoding="utf-8"))
    options = "{displayMode: display, output: 'mathml', strict: 'error', throwOnError: true}"
    # JSON, because the engine cannot hand over strings that it has glued together lazily.
    engine.eval(
        f"function render(tex, display) {{ return JSON.stringify(katex.renderToString(tex, {options})) }}"
    )
    return engine.get("render")


def mathml(tex: str, display: bool) -> str:
    """The MathML of a formula, without the copy of its source. Raises BadFormula."""
    try:
        rendered = json.loads(katex()(tex, display))
    except Exception as error:  # the engine has one exception type for everything
        message = str(error).splitlines()[0]
        raise BadFormula(re.sub(r"^ParseError: (KaTeX parse error: )?", "", message)) from None
    maths = rendered[rendered.index("<math") : rendered.rindex("</math>") + len("</math>")]
    maths = re.sub(r"<annotation.*?</annotation>|</?semantics>", "", maths, flags=re.S)
    # The font has bold digits as characters of their own; ziamath does not look there.
    maths = re.sub(
        r'<mn mathvariant="bold">(\d+)</mn>',
        lambda digits: f"<mn>{''.join(chr(0x1D7CE + int(digit)) for digit in digits[1])}</mn>",
        maths,
    )
    # A sign after a relation or an opening bracket is no operator between two terms, and needs less room.
    maths = re.sub(
        r'(<mo>=</mo>|<mo[^>]*fence="true"[^>]*>\(</mo>|<mo separator="true">,</mo>)<mo>−</mo>',
        r'\1<mo lspace="0" rspace="0.05em">−</mo>',
        maths,
    )
    # ziamath's table of operators lacks the signs of products.
    maths = re.sub("<mo>([⋅⊙])</mo>", r'<mo lspace="0.2em" rspace="0.2em">\1</mo>', maths)
    # The combining hat carries its attachment point in the font; the ASCII one floats too high.
    return maths.replace("<mo>^</mo></mover>", "<mo>\u0302</mo></mover>")


def normalise(tex: str) -> str:
    """The source on one line, without size commands: the style sheet sets the size."""
    return " ".join(SIZE_COMMANDS.sub("", tex).split())


def draw(tex: str, display: bool) -> Drawing:
    """Sets one formula. Raises BadFormula."""
    from ziamath.config import config
    from ziamath.zmath import Math

    config.svg2 = True
    svg = Math(mathml(tex, display), size=FONT_SIZE).svg()
    box = re.search(r'viewBox="([^"]+)"', svg)
    assert box, tex  # ziamath writes one
    x, y, width, height = (float(value) for value in box[1].split())
    svg = re.sub(r"<symbol[^>]*/>", "", svg)  # glyphs without ink, such as the function application sign
    symbols = {}
    for symbol in SYMBOL.finditer(svg):
        symbols[symbol[1]] = " ".join(symbol[0].replace('id="', 'id="m-', 1).split())
    inner = re.search(r"<svg[^>]*>(.*)</svg>", svg, re.S)
    assert inner, tex
    body = SYMBOL.sub("", inner[1])
    body = body.replace('href="#', 'href="#m-').replace(' fill="black"', "").replace("black", "currentColor")
    # A combining accent makes ziamath leave an empty margin on the left.
    ink = min((float(left) for left in re.findall(r'<(?:use|rect)[^>]* x="([-\d.]+)"', body)), default=x)
    if x < ink - 1:
        x, width = ink, width - (ink - x)
    # The symbols keep all their digits; where they stand is good to a thousandth of an em.
    body = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", body)
    return Drawing(
        width=width / FONT_SIZE,
        height=height / FONT_SIZE,
        depth=(y + height) / FONT_SIZE,
        view_box=f"{x:.2f} {y:.2f} {width:.2f} {height:.2f}",
        body=" ".join(body.split()),
        symbols=symbols,
    )


def cached_drawing(tex: str, display: bool, folder: Path) -> Drawing:
    """`draw`, remembered in a folder. Raises BadFormula."""
    key = hashlib.sha256(f"{VERSION} {display} {tex}".encode()).hexdigest()[:32]
    entry = folder / f"{key}.json"
    if entry.is_file():
        return Drawing(**json.loads(entry.read_text(encoding="utf-8")))
    drawing = draw(tex, display)
    folder.mkdir(parents=True, exist_ok=True)
    entry.write_text(json.dumps(drawing.__dict__), encoding="utf-8")
    return drawing


class PageMaths:
    """The formulas of one page: `render` each, then put `sprite` somewhere on the page."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.symbols: dict[str, str] = {}

    def render(self, tex: str, display: bool, name: str | None = None) -> str:
        """The HTML of a formula, on one line, safe inside Markdown. Raises BadFormula.

        A name becomes the id `formula-<name>` and a small label beside the formula.
        """
        tex = normalise(tex)
        drawing = cached_drawing(tex, display, self.folder)
        self.symbols |= drawing.symbols
        label = html.escape(tex).replace("|", "&#124;")
        svg = (
            f'<svg style="width:{drawing.width:.3f}em;height:{drawing.height:.3f}em;'
            f'vertical-align:{-drawing.depth:.3f}em" viewBox="{drawing.view_box}" fill="currentColor"'
            f' aria-hidden="true">{drawing.body}</svg>'
        )
        kind = "math math-display" if display else "math"
        anchor = f' id="formula-{name}"' if name else ""
        box = f'<span class="{kind}"{anchor} role="img" aria-label="{label}">{svg}</span>'
        if not name:
            return box
        return f'<span class="formula">{box}<a class="formula-name" href="#formula-{name}">{name}</a></span>'

    def sprite(self) -> str:
        """The glyphs of the page, invisible, to stand once anywhere on it; empty for a page without formulas."""
        if not self.symbols:
            return ""
        glyphs = "".join(self.symbols.values())
        return f'<svg class="math-glyphs" width="0" height="0" aria-hidden="true">{glyphs}</svg>'

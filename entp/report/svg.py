"""matplotlib's figures as SVG for one page of HTML: ids of their own, text as text, and colours
that can be read on light and on dark."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

DARK = "#0e1116"
"""The page behind a figure, where the reader wants it dark."""
READABLE = 3.0
"""Contrast with it from which lines are readable (WCAG 2, 1.4.11)."""
KEPT = 3.5
"""Contrast from which a colour stays as it is. Darker ones are spread below it, so that the darker
of two stays the darker."""
FONT_SIZE = ("font-size", "10px")
"""What the page says of text in figures."""
HREF = "{http://www.w3.org/1999/xlink}href"
NO_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
"""Characters that a label may have and XML may not."""
STYLE = re.compile(r' style="([\w:;.,()# -]+)"')
"""A style that may stand in a page's rules as it is."""
VARIABLE = re.compile(r"var\(--c([0-9a-f]{6}),")
"""A colour that is another one on dark."""


def inline_svg(figure: Any, name: str, title: str) -> str:
    """A matplotlib figure as an <svg> element for a page of HTML, where its ids begin with
    `name`."""
    root = ElementTree.fromstring(_drawn(figure, name))
    _drop(root)
    _rename_ids(root, name)
    for element in root.iter():
        _restyle(element)
        _shorten(element)
    for element in root.iter():
        _unwrap(element)
    return ElementTree.tostring(_headed(root, name, title), encoding="unicode")


def dark_colours(text: str) -> dict[str, str]:
    """The variables of the figures in a text, each with its colour on dark."""
    return {f"--c{found}": on_dark(f"#{found}") for found in sorted(set(VARIABLE.findall(text)))}


def share_styles(figures: Sequence[str]) -> tuple[str, list[str]]:
    """Rules for the styles that several elements of the figures have, and the figures with classes
    instead: the same drawing in less text."""
    counts = Counter(found for text in figures for found in STYLE.findall(text))
    names = {style: f"s{at}" for at, (style, n) in enumerate(counts.most_common()) if n > 1}

    def shortened(found: re.Match[str]) -> str:
        name = names.get(found[1])
        return found[0] if name is None else f' class="{name}"'

    rules = "\n".join(f".{name}{{{style}}}" for style, name in names.items())
    return rules, [STYLE.sub(shortened, text) for text in figures]


def on_dark(colour: str) -> str:
    """The colour that is drawn on dark in place of "#rrggbb": the same where it is readable, else
    mixed with so much white that it is."""
    had = contrast(colour, DARK)
    if had >= KEPT:
        return colour
    wanted = READABLE + (KEPT - READABLE) * max(0.0, had - 1) / (KEPT - 1)
    mixed = (_with_white(colour, part / 100) for part in range(101))
    return next(one for one in mixed if contrast(one, DARK) >= wanted)


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' luminances, from 1 to 21 (WCAG 2)."""
    low, high = sorted([_luminance(one), _luminance(other)])
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [value / 255 for value in bytes.fromhex(colour[1:])]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _with_white(colour: str, part: float) -> str:
    values = [round(value + part * (255 - value)) for value in bytes.fromhex(colour[1:])]
    return f"#{bytes(values).hex()}"


def _drawn(figure: Any, name: str) -> str:
    """The file that matplotlib writes, the same for the same figure."""
    from matplotlib import rc_context

    image = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(image, format="svg", transparent=True, metadata={"Date": None})
    return NO_XML.sub("\ufffd", image.getvalue().decode())


def _drop(root: Element) -> None:
    """Leave namespaces, metadata and styles for a whole document out."""
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]
    for parent in root.iter():
        for child in [one for one in parent if one.tag in ("metadata", "style")]:
            parent.remove(child)


def _rename_ids(root: Element, name: str) -> None:
    """Ids that something refers to begin with the name; others go."""
    used: dict[str, str] = {}
    for element in root.iter():
        for key, value in element.items():
            target = re.fullmatch(r"#(.+)|url\(#(.+)\)", value)
            if target is not None:
                old = target[1] or target[2]
                new = used.setdefault(old, f"{name}-{len(used) + 1}")
                element.set(key, value.replace(old, new))
    for element in root.iter():
        new_id = used.get(element.attrib.pop("id", ""))
        if new_id is not None:
            element.set("id", new_id)
        if HREF in element.attrib:
            element.set("href", element.attrib.pop(HREF))


def _restyle(element: Element) -> None:
    """Colours for light and dark, without what holds anyway: the page says the font, and what is
    used has its own strokes."""
    pairs = [one.split(":", 1) for one in element.attrib.pop("style", "").split(";") if one.strip()]
    found = {name.strip(): value.strip() for name, value in pairs}
    if element.tag == "use":
        found = {name: value for name, value in found.items() if not name.startswith("stroke")}
    if element.tag == "text":
        found = {k: v for k, v in found.items() if k != "font-family" and (k, v) != FONT_SIZE}
    else:  # white and black text stands on cells that have a colour
        found |= {k: _adapted(v) for k, v in found.items() if k in ("fill", "stroke")}
    if found:
        element.set("style", ";".join(f"{name}:{value}" for name, value in found.items()))


def _adapted(colour: str) -> str:
    """A colour of a line or an area in terms of the page's."""
    if colour == "#000000":
        return "currentColor"
    if colour == "#ffffff":
        return "var(--paper)"
    if not re.fullmatch(r"#[0-9a-f]{6}", colour) or on_dark(colour) == colour:
        return colour
    return f"var(--c{colour[1:]},{colour})"


def _shorten(element: Element) -> None:
    """A tenth of a point at most, for markers a hundredth; no needless space."""
    decimals = 2 if element.tag == "path" and "id" in element.attrib else 1
    for key in {"d", "x", "y", "width", "height"} & element.attrib.keys():
        element.set(key, _rounded(element.attrib[key], decimals))
    if not re.search("[CQ]", element.attrib.get("d", "C")):
        element.set("d", _relative(element.attrib["d"], decimals))
    turned = _rounded(element.attrib.pop("transform", ""), 2)
    if turned and not turned.startswith("rotate(-0 "):
        element.set("transform", turned)
    if element.tag != "text" and not (element.text or "").strip():
        element.text = None
    element.tail = None


def _relative(drawn: str, decimals: int) -> str:
    """Straight lines, of absolute M, L and z, as steps from point to point: half the length."""
    text = ""
    x = y = 0.0
    start, begun = (x, y), False
    for part in re.findall(r"[ML] [^MLz]+|z", drawn):
        if part == "z":
            (x, y), text = start, f"{text}z"
            continue
        to = [float(number) for number in part[1:].split()]
        if part[0] == "M":
            start, letter, shown = (to[0], to[1]), "M", to
        else:
            letter = "l" if text[-1] == "z" or begun else " "
            shown = [to[0] - x, to[1] - y]
        begun, (x, y) = part[0] == "M", to
        text += letter + " ".join(_number(value, decimals) for value in shown)
    return text.replace(" -", "-")


def _number(value: float, decimals: int) -> str:
    """Without a zero that says nothing."""
    text = f"{value:.{decimals}f}".rstrip("0").rstrip(".")
    return re.sub(r"^(-?)0\.", r"\1.", "0" if text in ("-0", "") else text)


def _rounded(text: str, decimals: int) -> str:
    """A text with shorter numbers."""

    def shorter(number: re.Match[str]) -> str:
        return f"{float(number[0]):.{decimals}f}".rstrip("0").rstrip(".")

    return " ".join(re.sub(r"-?\d+\.\d+", shorter, text).split())


def _unwrap(parent: Element) -> None:
    """Put the children of groups that say nothing in their place."""
    while any(_is_bare(child) for child in parent):
        children = [one for child in parent for one in (child if _is_bare(child) else [child])]
        parent[:] = children


def _is_bare(element: Element) -> bool:
    return element.tag == "g" and not element.attrib


def _headed(root: Element, name: str, title: str) -> Element:
    """The element with its title, and as wide as there is room."""
    width = float(root.attrib["viewBox"].split()[2]) * 4 / 3  # points to pixels
    svg = Element("svg", {"viewBox": root.attrib["viewBox"], "role": "img"})
    svg.attrib |= {"aria-labelledby": f"{name}-title", "style": f"--wide:{width:.0f}px"}
    heading = Element("title", {"id": f"{name}-title"})
    heading.text = NO_XML.sub("\ufffd", title)
    svg.extend([heading, *root])
    return svg

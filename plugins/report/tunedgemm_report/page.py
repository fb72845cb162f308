"""The page of a report: one HTML file that opens from disk and asks the network for nothing.

Its content security policy allows the page's own scripts by their hashes, and no request at all.
Text from files could not run even if it were not escaped.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunedgemm.plugin import UserError

from tunedgemm_report.charts import CONFIG, MOST_LAYERS, MOST_SHAPES, charts

#: The command that installs the library of the plots.
INSTALL = "pip install 'tunedgemm[report]'"
_FOLDER = Path(__file__).parent


def vega() -> Any:
    """Return the library that holds Vega and draws pictures.

    Raises:
        UserError: it is not installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise UserError(f"report: the plots need vl-convert-python, which is not installed; {INSTALL}") from None
    return vl_convert


@functools.cache
def _library() -> str:
    """Return Vega, Vega-Lite and their embedding as one script."""
    return _script(str(vega().javascript_bundle()))


def page(document: Mapping[str, Any], *, live: str = "") -> str:
    """Return a document as one HTML file.

    Args:
        document: of `tunedgemm_report.document.document`.
        live: a script that runs after the page's own, such as one that fetches newer documents and
            passes them to ``tunedgemmReport.update``. With it, the page may ask its own server.

    Raises:
        UserError: the library of the plots is not installed.
    """
    scripts = [_library(), _script(_text("page.js")), *([_script(live)] if live else [])]
    drawn = {name: vega().vegalite_to_vega({"config": CONFIG, **spec}) for name, spec in plots(document).items()}
    filled = {
        "POLICY": _policy(scripts, bool(live)),
        "TITLE": html.escape(str(document["title"])),
        "STYLE": style(),
        "DATA": json_text({"report": _packed(document), "charts": drawn, "most_shapes": MOST_SHAPES, "most_layers": MOST_LAYERS}),
        "SCRIPTS": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return re.sub(r"@@([A-Z]+)@@", lambda found: filled[found[1]], _text("page.html"))


def plots(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Vega-Lite specification of each plot of a document, by its name."""
    won = {shape["libtype"] for shape in document["shapes"]}
    several = len({shape["op"] for shape in document["shapes"]}) > 1
    return charts(document["libtypes"], [name for name in document["libtypes"] if name in won], several_ops=several)


def style() -> str:
    """Return the style sheet of the page."""
    return _text("page.css")


def _packed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with its shapes as columns, half as long; the page unpacks them."""
    compared = document["compare"]
    packed = {**document, "shapes": _columns(document["shapes"])}
    return packed if compared is None else {**packed, "compare": {**compared, "rows": _columns(compared["rows"])}}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in (rows[0] if rows else ())}


def json_text(value: Any) -> str:
    """Return JSON in ASCII that no HTML parser takes for markup."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: list[str], asks: bool) -> str:
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{text}'" for text in hashes)
    rest = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}" + ("; connect-src 'self'" if asks else "")


def _script(text: str) -> str:
    """Return a script that no HTML parser ends or comments out too early."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--").replace("\r\n", "\n").replace("\r", "\n")


@functools.cache
def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")

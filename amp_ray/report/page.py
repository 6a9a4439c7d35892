"""One static page: no server, no network, everything in one file."""

import html
import json
from collections.abc import Mapping
from importlib import resources
from string import Template
from typing import Any, Final

_FOLDER: Final = "data/report"
_LIBRARY: Final = "plotly-basic.min.js"


def page(record: Mapping[str, Any]) -> str:
    """Return the page of a report's record (`amp_ray.report.record`).

    Nothing of the record is markup: it stands in the page as JSON without ``<``, and the page's
    script sets it as text. The page may load nothing, by its content security policy.
    """
    folder = resources.files("amp_ray").joinpath(_FOLDER)

    def text(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    data = json.dumps(record, allow_nan=False, separators=(",", ":"))
    return Template(text("page.html")).substitute(
        title=html.escape(record["title"]),
        subtitle=html.escape(record["subtitle"]),
        style=text("page.css"),
        data=data.replace("<", "\\u003c"),
        plotly=text(_LIBRARY),
        script=text("page.js"),
    )

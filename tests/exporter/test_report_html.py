# SPDX-License-Identifier: Apache-2.0
"""The page says all that the report holds, loads nothing, lets no name become markup, and can be seen in a browser."""

from __future__ import annotations

import copy
import html.parser
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from exporter import small_models
from exporter.test_cli import run
from PIL import Image

from flash_export import report, report_example
from flash_export.find import find
from flash_export.report_html import as_html
from flash_export.rewrite import rewrite

CHECK = {
    "passed": True,
    "max_abs_error": 2e-6,
    "tolerance": 4e-6,
    "runs": [
        {
            "kind": "site",
            "name": "probs",
            "setting": "S=37",
            "passed": True,
            "max_abs_error": 2e-6,
            "tolerance": 4e-6,
            "note": None,
        },
        {
            "kind": "model",
            "name": "out",
            "setting": "S=37",
            "passed": True,
            "max_abs_error": 1e-6,
            "tolerance": 4e-6,
            "note": None,
        },
        {
            "kind": "model",
            "name": "out",
            "setting": "S=37",
            "passed": None,
            "note": "eager PyTorch does not run: it is tired",
        },
    ],
    "warnings": ["the unfused model was checked with a batch of one only"],
}


def document(text: str = small_models.TWO_ATTENTIONS_ONE_REFUSED, **changes: Any) -> dict[str, Any]:
    """The report of a run on ``text``, with ``changes`` laid over."""
    model = ir.from_proto(onnx.parser.parse_model(text))
    sites = find(model)
    before = report_example.look_before(model, sites)
    rewrite(model, sites)
    example = report_example.as_json(before, model)
    facts = report.Facts(Path("model.onnx"), "onnx", sites, (9, 6), {"load": 0.5, "check": 2.0}, example)
    made = report.as_json(facts, Path("m.flash.onnx"), Path("m.flash.unfused.onnx"), copy.deepcopy(CHECK))
    return json.loads(json.dumps(made, default=str)) | changes


class Page(html.parser.HTMLParser):
    """Tags, attributes and text of a page; what a browser would see of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def test_fused_sites_are_listed_with_their_numbers() -> None:
    text = Page(as_html(document())).text
    for words in ("What was fused", "probs", "FlashAttention", "0.25", "none", "9", "m.flash.unfused.onnx"):
        assert words in text


def test_a_refusal_is_shown_with_reason_node_and_action() -> None:
    made = document()
    (refused,) = [site for site in made["sites"] if site["status"] == "refused"]
    text = Page(as_html(made)).text
    for words in refused["reason"].values():
        assert " ".join(words.split()) in text


def test_what_could_not_be_compared_is_said() -> None:
    text = Page(as_html(document())).text
    assert "eager PyTorch does not run: it is tired" in text
    assert "checked with a batch of one only" in text


def test_a_softmax_that_is_no_attention_is_listed() -> None:
    page = Page(as_html(document(small_models.CLASSIFIER)))
    assert "1 softmax that is no attention" in page.text
    assert "One of them, before and after" not in page.text


def test_a_page_of_a_model_without_attention_claims_no_proof() -> None:
    text = Page(as_html(document(small_models.CLASSIFIER))).text
    assert "No attention was fused" in text
    assert "was compared with the unfused one" not in text


def test_every_field_of_a_report_is_on_its_page_of_the_docs(repo_root: Path) -> None:
    page = (repo_root / "docs" / "report.md").read_text()
    made = document()
    fields = {*made, *made["sites"][0], *made["sites"][1]["reason"], *made["example"], *made["example"]["memory"]}
    assert not [field for field in fields if f"`{field}`" not in page and f"`example.{field}`" not in page]


def test_a_page_without_a_check_says_that_nothing_is_proven() -> None:
    text = Page(as_html(document(check=None))).text
    assert "Not proven" in text
    assert "Errors that the check measured" not in text


def test_a_site_that_is_off_shows_at_its_share_of_the_tolerance() -> None:
    assert "50 % over 2 comparisons" in Page(as_html(document())).text


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = Page(as_html(document()))
    loading = {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}
    assert not [(tag, attributes) for tag, attributes in page.tags if loading & attributes.keys()]
    assert not {"script", "link", "iframe", "object", "embed", "img"} & {tag for tag, _ in page.tags}
    assert not re.search(r"url\(|@import|https?:", as_html(document()))
    policies = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def with_names(value: Any, name: str) -> Any:
    """``value`` with every text that is not a fixed word of the schema replaced by ``name``."""
    if isinstance(value, Mapping):
        fixed = {"status", "kind", "schema", "causal"}
        return {key: item if key in fixed else with_names(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [with_names(item, name) for item in value]
    return name if isinstance(value, str) else value


@pytest.mark.parametrize(
    "name", ["</title><script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "{{ 7 * 7 }}"]
)
def test_a_hostile_name_stays_text(name: str) -> None:
    harmless = [tag for tag, _ in Page(as_html(with_names(document(), "name"))).tags]
    page = Page(as_html(with_names(document(), name)))
    assert [tag for tag, _ in page.tags] == harmless
    assert name in page.text


def test_a_run_writes_the_page_beside_the_numbers(tmp_path: Path) -> None:
    source = small_models.write(small_models.ATTENTION, tmp_path / "in.onnx")
    assert run(source, "--report", tmp_path / "reports") == 0
    assert sorted(p.name for p in (tmp_path / "reports").iterdir()) == ["report.html", "report.json"]
    made = json.loads((tmp_path / "reports" / "report.json").read_text())
    assert (tmp_path / "reports" / "report.html").read_text() == as_html(made)


# In a browser.

LIGHT, DARK = "1", "0"
STYLE = {LIGHT: {"page": "f6f7f9", "fused": "0b7a53"}, DARK: {"page": "12161c", "fused": "3ecf96"}}


def screenshot(page: Path, colours: str) -> np.ndarray:
    """The page in headless Chromium, 1200 wide: uint8 [height, width, 3]."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium here (apt-get install chromium)")
    picture = page.with_suffix(".png")
    subprocess.run(
        [
            chromium,
            "--headless",
            "--no-sandbox",  # the page is ours, and root has no sandbox
            "--disable-gpu",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={page.parent / 'profile'}",
            f"--blink-settings=preferredColorScheme={colours}",
            "--window-size=1200,1900",
            f"--screenshot={picture}",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
        env=os.environ | {"HOME": str(page.parent)},
    )
    with Image.open(picture) as image:
        return np.asarray(image.convert("RGB"))


def rows_with(pixels: np.ndarray, colour: str) -> np.ndarray:
    """The rows that hold a pixel of ``colour`` (hex)."""
    wanted = np.frombuffer(bytes.fromhex(colour), np.uint8)
    return np.flatnonzero((pixels == wanted).all(-1).any(-1))


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_the_page_is_drawn_in_light_and_in_dark(tmp_path: Path, colours: str) -> None:
    page = tmp_path / "report.html"
    page.write_text(as_html(document()))
    pixels = screenshot(page, colours)
    style = STYLE[colours]
    np.testing.assert_array_equal(pixels[0, 0], np.frombuffer(bytes.fromhex(style["page"]), np.uint8))
    # The tile's number, the node's frame, the memory's line and the histogram's bars, all over the page's height.
    fused = rows_with(pixels, style["fused"])
    assert fused.size > 150
    assert np.ptp(fused) > 700
    # Words are drawn: the page has many shades between text and card.
    assert len(np.unique(pixels.astype(np.int64) @ [1 << 16, 1 << 8, 1])) > 100

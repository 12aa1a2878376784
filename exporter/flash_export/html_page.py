# SPDX-License-Identifier: Apache-2.0
"""The templates of our HTML pages, which load nothing and run nothing.

Names in a page come from model files that anybody may have made: every value is escaped unless a template marks it as a
drawing of ours, and the page's own policy (``page.html.j2``) forbids scripts and loading, should one slip by.
"""

from __future__ import annotations

from typing import Any

import jinja2


def render(package: str, template: str, **values: Any) -> str:
    """The page that ``template`` of ``package`` makes of ``values``; a value that it lacks raises UndefinedError.

    ``page.html.j2``, which every template extends, is this package's.
    """
    packages = dict.fromkeys((package, "flash_export"))
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in packages]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)

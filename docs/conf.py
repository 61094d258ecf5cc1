"""Sphinx's configuration of the documentation site: README.md, the pages of docs/ and the notebooks. See `make docs`."""

import json

project = html_title = "RLHF Pipeline"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "AGENTS.md",
    "docs/*.md",
    "notebooks/*.ipynb",
]
html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["site.css"]
myst_heading_anchors = 4  # headings of levels 1 to 4 get anchors, as on GitHub
suppress_warnings = ["myst.header"]  # troubleshooting.md skips levels of headings

# Pages of the site by group, in reading order. On GitHub, README.md has a table of pages instead.
NAVIGATION = {
    "Train": "install tutorial failed_gates data sft reward_model dpo ppo evaluate "
    "notebooks/llama3_reward_model notebooks/ppo",
    "How to": "models judges training rollouts loop serving hub clusters gpu troubleshooting",
    "Reference": "configuration metrics cli runs glossary architecture measurements CONTRIBUTING AGENTS CHANGELOG",
}


def add_navigation(app, name, source):
    if name == root_doc:
        for caption, pages in NAVIGATION.items():
            paths = [page if page.isupper() or "/" in page else f"docs/{page}" for page in pages.split()]
            source[0] += "\n```{toctree}\n:hidden:\n:caption: " + "\n".join([caption, "", *paths, "```", ""])


def page_of(notebook):
    """Returns the cells and outputs of a notebook as Markdown."""
    cells = ["\n".join(in_markdown(cell)) for cell in json.loads(notebook)["cells"]]
    # Notebooks have formulas. On the other pages, $ means dollars.
    formulas = "---\nmyst:\n  enable_extensions: [dollarmath]\n---"
    return "\n\n".join([formulas, *cells])


def in_markdown(cell):
    """Returns the lines of a cell and of its outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    plain = any(line.lstrip().startswith("!") for line in source.splitlines())  # shell commands
    lines = ["````" + ("text" if plain else "python"), source, "````"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            lines += ["", f"![What the cell above draws](data:image/png;base64,{data['image/png'].strip()})"]
        elif text := "".join(output.get("text", data.get("text/plain", ""))).strip("\n"):
            lines += ["", "````text", text, "````"]
    return lines


def setup(app):
    from myst_parser.parsers.sphinx_ import MystParser

    class Notebooks(MystParser):
        supported = ("notebook",)

        def parse(self, inputstring, document):
            super().parse(page_of(inputstring), document)

    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(Notebooks)
    app.connect("source-read", add_navigation)

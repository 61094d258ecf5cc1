"""The documentation site: README.md and the pages of docs/, as they are on GitHub. `make docs` builds it."""

project = html_title = "RLHF Pipeline"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md", "docs/*.md"]
html_theme = "furo"
myst_heading_anchors = (
    4  # as GitHub makes them; a link to a missing one is a warning, which `make docs` makes an error
)
suppress_warnings = ["myst.header"]  # troubleshooting.md has its messages as small headings

# On GitHub, the table at the end of README.md is the navigation.
NAVIGATION = """

```{toctree}
:hidden:

docs/install
docs/tutorial
```

```{toctree}
:hidden:
:glob:

docs/*
CONTRIBUTING
AGENTS
CHANGELOG
```
"""


def add_navigation(app, name, source):
    if name == root_doc:
        source[0] += NAVIGATION


def setup(app):
    app.connect("source-read", add_navigation)

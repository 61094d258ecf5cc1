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

# On GitHub, the table at the end of README.md is the navigation. Each list is in reading order.
NAVIGATION = {
    "Train": "install tutorial failed_gates data sft reward_model dpo ppo evaluate",
    "How to": "models judges training rollouts loop serving hub clusters gpu troubleshooting",
    "Reference": "configuration metrics cli runs glossary architecture measurements CONTRIBUTING AGENTS CHANGELOG",
}


def add_navigation(app, name, source):
    if name == root_doc:
        for caption, pages in NAVIGATION.items():
            paths = [page if page.isupper() else f"docs/{page}" for page in pages.split()]
            source[0] += "\n```{toctree}\n:hidden:\n:caption: " + "\n".join([caption, "", *paths, "```", ""])


def setup(app):
    app.connect("source-read", add_navigation)

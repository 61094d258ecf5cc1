"""Parses the references in a job to a model, a function or a judge.

models:/NAME@ALIAS, models:/NAME/VERSION    a registered version
python:MODULE:FUNCTION                      a function
judge:FILE@DIGEST                           a judge, which a job names as {judge: FILE}
anything else                               a folder, a repository on the hub (system/hub.py), or `base`
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = r"\w[\w .+()-]*"  # name of a registered model
MODEL = re.compile(rf"models:/(?P<name>{NAME})(?:@(?P<alias>[\w-]+)|/(?P<version>[0-9]{{1,9}}))")
JUDGE = "judge:"
FUNCTION = re.compile(r"python:(?P<name>[A-Za-z_][\w.]*):(?P<function>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class InputURI:
    """A parsed reference. `name` is a registered model, a module or a judge. All fields are empty for folders and the Hub."""

    name: str = ""
    alias: str | None = None
    version: str | None = None
    function: str | None = None

    @classmethod
    def parse(cls, text: str | None) -> InputURI:
        match = MODEL.fullmatch(text or "") or FUNCTION.fullmatch(text or "")
        if (text or "").startswith(JUDGE):
            return cls(str(text))
        return cls(**match.groupdict()) if match else cls()

    @property
    def is_registered(self) -> bool:
        return bool(self.alias or self.version)

    @property
    def is_function(self) -> bool:
        return bool(self.function)

    @property
    def is_judge(self) -> bool:
        return self.name.startswith(JUDGE)

    @property
    def is_model(self) -> bool:
        """Returns True unless the reference is a function or a judge, which have no local weights."""
        return not (self.is_function or self.is_judge)

    def __str__(self) -> str:
        if self.function:
            return f"python:{self.name}:{self.function}"
        if self.is_judge:
            return self.name
        return f"models:/{self.name}" + (f"@{self.alias}" if self.alias else f"/{self.version}")


def short_title(text: str) -> str:
    """Returns a model version's short title, for example `rlhf-dpo v3` for models:/rlhf-dpo/3. Returns other text unchanged."""
    ref = InputURI.parse(text)
    return f"{ref.name} v{ref.version}" if ref.version else text

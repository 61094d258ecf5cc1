"""Removes credentials from everything that is printed or written.

>>> without_credentials("http://me:pass@host:5000/x?token=abc")
'http://host:5000/x?token=***'
"""

import functools
import importlib.util
import os
import re
from urllib.parse import unquote

_USERINFO = re.compile(
    r"""(?<=://)
    (?:
        [^/\s"'<>@:]*:          # user:
        (?!\d{1,5}[/?#,;)\]])  # not the port of host:8080/x@y
        [^\s"'<>@]*@            # password@, possibly with the raw slash of an AWS secret
        (?:[^/\s"'<>@]*@)*      # a raw @ in the password
    |
        (?<=http://)[^/\s"'<>?\#:@]+@ | (?<=https://)[^/\s"'<>?\#:@]+@  # token@, but not abfss://CONTAINER@account
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_PARAMETER = re.compile(
    r"""([?&;] (?: [\w.-]*(?:access_?key|secret|api_?key|token|passw|pwd|credential|signature)[\w.-]* | sig|key|sas|auth ) =)
    [^&;\s"'<>]+""",
    re.VERBOSE | re.IGNORECASE,
)
# Matches private keys, and tokens of services that the pipeline uses
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bsk-[\w-]{20,}"
    r"|\bdapi[0-9a-f]{32}|\bxox[abp]-[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_PORT = re.compile(r"\d{1,5}([/?#,;]|$)")
# Matches names of environment variables that hold a secret, but not HF_TOKEN_PATH or TOKENIZERS_PARALLELISM
_SECRET_NAME = re.compile(
    r"(TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_KEY|CONNECTION_STRING)$", re.IGNORECASE
)
FORWARDED_MODULE = "rlhf_forwarded"  # module with VARIABLES, which `submit` generates and uploads
_MIN_LENGTH = 8  # minimum length of a secret in characters; a shorter value may be an ordinary word


def take_forwarded() -> None:
    """Sets the environment variables that `submit` forwarded with the job. Does nothing if `submit` forwarded no variables."""
    if importlib.util.find_spec(FORWARDED_MODULE):
        os.environ.update(importlib.import_module(FORWARDED_MODULE).VARIABLES)


def without_credentials(text: str) -> str:
    """Removes credentials in URIs from a text, and values of environment variables that hold secrets."""
    for secret, mask in _secrets(tuple(os.environ.items())):
        text = text.replace(secret, mask)
    return _PARAMETER.sub(r"\1***", _USERINFO.sub("", text))


def without_secrets(text: str) -> str:
    """Removes credentials from a text, like `without_credentials`, and also replaces words that look like a token by ***."""
    return SECRET.sub("***", without_credentials(text))


def has_credentials(text: str) -> bool:
    """Returns True if a URI in the text has a password, a token or a key."""
    return bool(_USERINFO.search(text) or _PARAMETER.search(text))


def user_and_password(uri: str) -> tuple[str, str]:
    """Returns the percent-decoded user and password of a URI. A missing user or password is an empty string."""
    match = _USERINFO.search(uri)
    user, _, password = match[0][:-1].partition(":") if match else ("", "", "")
    return unquote(user), unquote(password)


@functools.lru_cache(maxsize=1)  # cached, because this function is called for every printed line
def _secrets(environment: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """Returns (secret, replacement) for variables whose name matches _SECRET_NAME, and for credentials in URI variables.

    In a URI variable, everything before the last @ counts as credentials, so that a password may contain any character.
    """
    replacements: dict[str, str] = {}
    for name, value in environment:
        if _SECRET_NAME.search(name):
            replacements[value.strip()] = "***"
        elif re.match(r"[a-z][a-z0-9+.-]*://", value, re.IGNORECASE):
            authority = value.partition("://")[2]
            user, colon, password = authority.rpartition("@")[0].partition(":")
            if colon and "/" not in user and not _PORT.match(password):
                replacements[f"{user}:{password}@"] = ""
                replacements[password] = replacements[unquote(password)] = "***"
            elif token := user_and_password(value)[0]:
                replacements[token] = "***"
    pairs = (
        (secret, mask) for secret, mask in replacements.items() if len(secret) >= _MIN_LENGTH or not mask
    )
    return sorted(pairs, key=lambda pair: len(pair[0]), reverse=True)

"""Credentials stay in the environment: nothing that is printed or written contains them.

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
        [^\s"'<>@]*@            # password@, with a raw slash too: AWS secrets have them
        (?:[^/\s"'<>@]*@)*      # a raw @ in the password
    |
        (?<=http://)[^/\s"'<>?\#:@]+@ | (?<=https://)[^/\s"'<>?\#:@]+@  # token@; abfss://CONTAINER@account is no secret
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_PARAMETER = re.compile(
    r"""([?&;] (?: [\w.-]*(?:access_?key|secret|api_?key|token|passw|pwd|credential|signature)[\w.-]* | sig|key|sas|auth ) =)
    [^&;\s"'<>]+""",
    re.VERBOSE | re.IGNORECASE,
)
# Tokens and keys of the services that the pipeline uses, and private keys.
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bsk-[\w-]{20,}"
    r"|\bdapi[0-9a-f]{32}|\bxox[abp]-[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_PORT = re.compile(r"\d{1,5}([/?#,;]|$)")
# Names of variables that hold a secret; HF_TOKEN_PATH and TOKENIZERS_PARALLELISM do not.
_SECRET_NAME = re.compile(
    r"(TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_KEY|CONNECTION_STRING)$", re.IGNORECASE
)
FORWARDED_MODULE = "rlhf_forwarded"  # its VARIABLES are the ones that a job's submitter forwards
_MIN_LENGTH = 8  # characters of a secret: a shorter value may be an ordinary word of the text


def take_forwarded() -> None:
    """Sets the environment variables that the submitter forwarded, if this process belongs to a submitted job."""
    if importlib.util.find_spec(FORWARDED_MODULE):
        os.environ.update(importlib.import_module(FORWARDED_MODULE).VARIABLES)


def without_credentials(text: str) -> str:
    """Returns a text without users, passwords and tokens in URIs, and without the environment's secrets."""
    for secret, shown in _secrets(tuple(os.environ.items())):
        text = text.replace(secret, shown)
    return _PARAMETER.sub(r"\1***", _USERINFO.sub("", text))


def without_secrets(text: str) -> str:
    """Returns a text for people: without credentials, and without what looks like a token, as in an error of a user's code."""
    return SECRET.sub("***", without_credentials(text))


def has_credentials(text: str) -> bool:
    """Returns True if a URI in the text has a password, a token or a key."""
    return bool(_USERINFO.search(text) or _PARAMETER.search(text))


def user_and_password(uri: str) -> tuple[str, str]:
    """Returns user and password of `scheme://user:password@host`, decoded, or empty texts if the URI has none."""
    match = _USERINFO.search(uri)
    user, _, password = match[0][:-1].partition(":") if match else ("", "", "")
    return unquote(user), unquote(password)


@functools.lru_cache(maxsize=1)  # the environment changes rarely, and every printed line needs this
def _secrets(environment: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """Returns (secret, replacement): values of secret variables, and users, passwords and tokens of URIs in other variables.

    A variable is one URI, so everything before its last @ is no host, even if a password has unusual characters.
    """
    replacements: dict[str, str] = {}
    for name, value in environment:
        if _SECRET_NAME.search(name):
            replacements[value.strip()] = "***"
        elif re.match(r"[a-z][a-z0-9+.-]*://", value, re.IGNORECASE):
            rest = value.partition("://")[2]
            user, colon, password = rest.rpartition("@")[0].partition(":")
            if colon and "/" not in user and not _PORT.match(password):
                replacements[f"{user}:{password}@"] = ""
                replacements[password] = replacements[unquote(password)] = "***"
            elif lone := user_and_password(value)[0]:
                replacements[lone] = "***"
    long = (
        (secret, shown) for secret, shown in replacements.items() if len(secret) >= _MIN_LENGTH or not shown
    )
    return sorted(long, key=lambda one: len(one[0]), reverse=True)

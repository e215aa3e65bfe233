"""What may go into a manifest that is passed on: no secrets, no names of hosts."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

HOST: Final = "<host>"
SECRET: Final = "<secret>"  # noqa: S105 (what stands in place of one)

ENVIRONMENT: Final = (
    *("K25_", "OMP_", "KMP_", "MKL_", "NCCL_", "TORCH_NCCL_", "VLLM_", "CUDA_", "PYTORCH_", "TORCHINDUCTOR_"),
    *("TRITON_", "FLASHINFER_", "HIP_", "ROCR_", "RCCL_", "GLOO_"),
)
"""Prefixes of the variables that change what is measured. All others are left out."""

_SECRET_NAME: Final = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_HOST_NAME: Final = re.compile(r"HOST|ADDR|(?:^|_)IP(?:$|_)|URL|URI|ENDPOINT|SERVER|USER|HOME", re.IGNORECASE)
_SECRET_OPTION: Final = re.compile(r"--?[\w-]*(?:api-?key|token|secret|password|header)s?$", re.IGNORECASE)
_SECRET_VALUE: Final = re.compile(r"\b(?:hf_|sk-|ghp_|Bearer\s)[\w.-]{8,}")
_URL: Final = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"',]+")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its name alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def scrub_url(url: str) -> str:
    """The URL without user, password and, unless it is this machine's, host."""
    parts = urlsplit(url)
    if not parts.hostname:
        return url
    host = parts.hostname if is_loopback(parts.hostname) else HOST
    host = f"[{host}]" if ":" in host else host
    try:
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        port = ""
    return f"{parts.scheme}://{host}{port}{parts.path}"


def scrub_text(text: str, hosts: Iterable[str] = ()) -> str:
    """Text without URLs' hosts, what looks like a key, and the names in `hosts`."""
    clean = _SECRET_VALUE.sub(SECRET, _URL.sub(lambda match: scrub_url(match[0]), text))
    for host in hosts:
        if host and not is_loopback(host):
            clean = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", HOST, clean)
    return clean


def scrub_command(arguments: Sequence[str], hosts: Iterable[str] = ()) -> list[str]:
    """A command line without hosts and without the values of options that are secrets."""
    clean: list[str] = []
    hide = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide:
            clean.append(SECRET)
        elif equals and _SECRET_OPTION.fullmatch(name):
            clean.append(f"{name}={SECRET}")
        else:
            clean.append(scrub_text(argument, hosts))
        hide = not hide and not equals and _SECRET_OPTION.fullmatch(argument) is not None
    return clean


def kept_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of :data:`ENVIRONMENT` that are neither secrets nor places."""
    return {
        name: scrub_text(value)
        for name, value in sorted(environment.items())
        if name.startswith(ENVIRONMENT) and not _SECRET_NAME.search(name) and not _HOST_NAME.search(name)
    }

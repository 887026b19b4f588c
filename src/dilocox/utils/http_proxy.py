"""Requests to public web addresses go through the proxy that the environment names, if any."""

from __future__ import annotations

import ipaddress
import urllib.request
from typing import Any
from urllib.parse import unquote, urlsplit

import urllib3

from dilocox.errors import ConfigError


def proxy_of(url: str) -> str | None:
    """Return the URL of the proxy for `url`, from `HTTP_PROXY` or `HTTPS_PROXY`.

    None if there is none, if `NO_PROXY` names the host, or if the host is this machine. The names
    may be in small letters.
    """
    parts = urlsplit(url)
    host = parts.hostname or "localhost"
    if _is_here(host) or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return urllib.request.getproxies().get(parts.scheme.lower())


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def pool_for(url: str, **options: Any) -> urllib3.PoolManager:
    """Return a pool of connections for requests to `url`, through the proxy for it if any.

    `options`: those of `urllib3.PoolManager`. Raises `ConfigError` for a proxy that cannot be used.
    """
    proxy = proxy_of(url)
    if proxy is None:
        return urllib3.PoolManager(**options)
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    host = parts.netloc.rpartition("@")[2]
    headers = None
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = urllib3.make_headers(proxy_basic_auth=user)
    try:
        return urllib3.ProxyManager(f"{parts.scheme}://{host}", proxy_headers=headers, **options)
    except urllib3.exceptions.HTTPError:
        raise ConfigError(
            f"the proxy {parts.scheme}://{host} of the environment cannot be used for "
            f"{urlsplit(url).hostname}: name one of http or https in HTTP_PROXY and HTTPS_PROXY, "
            "or the host in NO_PROXY"
        ) from None

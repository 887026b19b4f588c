"""Users and passwords in URLs are found whatever the passwords hold, and nothing else is hidden."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.errors import ConfigError
from dilocox.utils.fetch import fetch
from dilocox.utils.secret_text import hide_secrets, secret_problem, users_of

LETTERS = string.ascii_letters + string.digits
PRINTED = LETTERS + string.punctuation
USERS = st.text(LETTERS + "-_.+", min_size=1, max_size=20)
PLACES = st.builds(
    "{}{}{}".format,
    st.sampled_from(["host", "a.example"]),
    st.sampled_from(["", ":80"]),
    st.sampled_from(["", "/", "/a:b/c_d-e"]),
)
"""Host and path without a user."""


def _is_ordinary(password: str) -> bool:
    """Whether `password` neither looks like a port with a path, nor begins another URL."""
    return not re.match(r"\d{1,5}[/?#]", password) and not re.search(r"[,;|]\w+://", password)


PASSWORDS = st.text(PRINTED, min_size=1, max_size=40).filter(_is_ordinary)


def hidden(text: str) -> str:
    """`text` as it is shown, without a look at the environment."""
    return hide_secrets(text, {})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:p@ss@host/x", "https://***@host/x"),
        ("s3://AKIA:ab/cd+ef==@bucket/x", "s3://***@bucket/x"),
        ("s3://AKIA:12/cd+ef==@bucket/x", "s3://***@bucket/x"),
        ("https://user:p#w?/@host/x", "https://***@host/x"),
        ("https://user:/pw@host/x", "https://***@host/x"),
        ("https://user:p'w@host/x", "https://***@host/x"),
        ("'https://user:pw@host/x','a@b'", "'https://***@host/x','a@b'"),
        ("'git+https://user:pw@host/x','a@b'", "'git+https://***@host/x','a@b'"),
        ("git+https://token@host/x", "git+https://***@host/x"),
        ("redis://:pw@host", "redis://***@host"),
        ("https://token@github.com/a/b.git", "https://***@github.com/a/b.git"),
        ("git+https://a:b@h/x", "git+https://***@h/x"),
        ("simplecache::s3://a:b/c@bucket", "simplecache::s3://***@bucket"),
        ("https://h/login?next=https://a:b@h/x", "https://h/login?next=https://***@h/x"),
        ("https://a:b@h/x https://c:d/e@i/y", "https://***@h/x https://***@i/y"),
        ("https://a:b@h/x,s3://c:d@e@i/y", "https://***@h/x,s3://***@i/y"),
        ("https://a:b@h/x|a+s3://c:d@e@i/y", "https://***@h/x|a+s3://***@i/y"),
    ],
)
def test_users_and_passwords_are_hidden(text: str, shown: str) -> None:
    assert hidden(text) == shown
    assert hidden(shown) == shown
    assert secret_problem(text.split()[0]) is not None


@pytest.mark.parametrize(
    "text",
    [
        "https://host/@user/x", "https://host/a:b@c", "https://host:8080/a@b", "https://host?a:b@c",
        "https://[::1]:8080/a@b", "mail me@host.example", "git@host:path", "image@sha256:0123",
        "docker://host/image:1@sha256:0123", "oci://host:5000/image:1@sha256:0123",
        "ssh://git@host:22/x", "abfs://container@account.dfs.core.windows.net/a:b",
        "zerog://0123@host:5678", "{'a':'https://host:80','mail':'a@b'}", "file:///a:b@c",
        "https://host:80, a:b@c", "Basic a:b@c", "https://@host/x",
        f"zerog+https://0x{'ab' * 32}@node:5678/x",
    ],
)  # fmt: skip
def test_what_holds_no_password_stays_as_it_is(text: str) -> None:
    assert hidden(text) == text
    assert not any(users_of(word) for word in text.split())


@given(st.sampled_from(["https", "HTTP", "s3", "postgres+x"]), USERS, PASSWORDS, PLACES)
def test_no_part_of_a_password_is_left(scheme: str, user: str, password: str, place: str) -> None:
    url = f"{scheme}://{user}:{password}@{place}"
    shown = f"{scheme}://***@{place}"
    for before, after in (("", ""), ("at ", " again"), ("(", ")"), ("x=", "\n")):
        assert hidden(before + url + after) == before + shown + after
    for quote in "'\"`":
        if quote not in password:
            # JSON and Python write lists without spaces, too.
            assert hidden(f"{quote}{url}{quote},{quote}a@b") == f"{quote}{shown}{quote},{quote}a@b"
    assert users_of(url) == [f"{user}:{password}"]
    assert "the URL holds a password" in str(secret_problem(url))


@given(st.text(LETTERS + "+/", min_size=1).map(lambda key: key + "=="), PLACES)
def test_a_bucket_has_no_port(key: str, place: str) -> None:
    """So a secret key that begins like a port and a path is known, too."""
    assert hidden(f"s3://AKIA:{key}@{place}") == f"s3://***@{place}"
    assert "the URL holds a password" in str(secret_problem(f"s3://AKIA:{key}@{place}"))


@given(
    st.lists(st.tuples(USERS, PASSWORDS, PLACES), max_size=4),
    st.sampled_from([" ", "\n", ",", ";", "|"]),
)
def test_each_url_of_a_list_keeps_its_own_host(
    urls: list[tuple[str, str, str]], between: str
) -> None:
    line = between.join(f"https://{user}:{password}@{place}" for user, password, place in urls)
    assert hidden(line) == between.join(f"https://***@{place}" for _, _, place in urls)


@given(
    st.sampled_from(["https", "s3", "memory", "file"]),
    PLACES,
    st.text(PRINTED.replace("?", "").replace("#", "")),
)
def test_a_path_may_hold_what_it_will(scheme: str, place: str, path: str) -> None:
    if "://" in path:
        return
    bare = place.replace(":", "") if scheme in ("s3", "file") else place
    url = f"{scheme}://{bare.partition('/')[0]}/{path}"
    assert hidden(url) == url
    assert secret_problem(url) is None


@given(st.text("ab1:/@?#[],'\" ", max_size=40).map(lambda text: text.replace("1", "https://")))
def test_what_is_hidden_is_not_written_down_either(text: str) -> None:
    shown = hidden(text)
    assert hidden(shown) == shown
    if shown != text:
        assert any(secret_problem(word) is not None for word in text.split())


@pytest.mark.parametrize("url", ["http://a:b@127.0.0.1:1/x", "http://a:b/c@127.0.0.1:1/x"])
def test_a_url_with_a_password_is_not_fetched(url: str) -> None:
    with pytest.raises(ConfigError, match="the URL holds a user or a password") as refused:
        fetch(url, 10)
    assert "a:b" not in str(refused.value)

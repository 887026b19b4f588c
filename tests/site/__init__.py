"""Tests of the site room."""  # noqa: A005

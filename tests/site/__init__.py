"""Tests of the site room."""

"""The run page: one self-contained HTML page about a run, from what its folder holds.

`folder` reads, `history` and `page` say what it means (pure), `charts` draws, `render` writes HTML.
All text of a run's folder is untrusted: it reaches the page only through the templates' escaping.
"""

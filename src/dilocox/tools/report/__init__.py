"""The report page: one self-contained HTML page about a run, made from the files of its folder.

`folder` reads the files. `history`, `tables`, `curves` and `page` compute the contents with pure
functions. `charts` computes the geometry of charts, and `render` writes HTML. All text of a run's
folder is untrusted: it reaches the page only through the templates' escaping.
"""

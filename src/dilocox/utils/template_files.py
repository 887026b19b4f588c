"""Names of the files of chat templates in a tokenizer's folder, as transformers has them."""

from __future__ import annotations

TEMPLATE_FILE = "chat_template.jinja"
"""The template, or the one named `default` if there are several."""
TEMPLATES_FOLDER = "additional_chat_templates"
"""Folder of the other templates: files NAME.jinja, such as `tool_use.jinja`."""

"""Chat templates in the manner of well-known models, for tests."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen 2."""

GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The same text as `CHATML`, with marks around what the assistant writes."""

INST = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
"""As Llama 2: no beginning of an assistant's message, and roles that it refuses."""

THINKING = (
    "{% for m in messages %}{% set text = m.content.split('</think>')[-1].lstrip() %}"
    "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' + m.reasoning_content | default('') + '</think>\\n' }}"
    "{{ text + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen 3: the thoughts of earlier messages are left out."""

PLAIN = (
    "{% for m in messages %}{{ '### ' + m.role + '\\n' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)
"""Marks that are text, and end-of-text behind the assistant's messages."""

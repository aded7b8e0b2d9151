"""Chat templates in the styles of common models, and a tokenizer for each: one token per byte, and special tokens."""

from typing import Any

#: Ends every turn alike; calls of tools follow the content, and answers of tools are one user turn.
CHATML = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

#: Removes the reasoning of every answer that a user message follows.
THINKING = """{%- set last = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > last.user and (loop.last or message.reasoning_content) -%}
<think>
{{ (message.reasoning_content or '').strip('\\n') }}
</think>

{% endif %}{{ content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

#: Strips content; a turn has one call at most, which replaces its content.
LLAMA = """<|begin_of_text|>
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- {'name': message.tool_calls[0].function.name, 'parameters': message.tool_calls[0].function.arguments} | tojson }}
{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + (message.role if message.role != 'tool' else 'ipython') + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

#: Has no prompt for an answer, asserts the order of roles, and shows tools before the last user message.
MISTRAL = """<s>
{%- set order = namespace(users=true) %}
{%- set last = namespace(user=-1, calls=false) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if not last.calls %}{{ raise_exception('a tool answers a call') }}{% endif %}
{{- '[TOOL_RESULTS] ' + ({'content': message.content} | tojson) + '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
{%- set last.calls = true %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{{ (', ' if not loop.first else '') + (call.function | tojson) }}{% endfor %}
{{- ']</s>' }}
{%- else %}
{%- if (message.role == 'user') != order.users %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set order.users = not order.users %}
{%- if message.role == 'user' %}
{%- if loop.index0 == last.user and tools %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- else %}{{ ' ' + message.content + '</s>' }}{% endif %}
{%- endif %}
{%- endfor %}"""

#: Has neither special tokens nor a newline after the prompt for an answer.
PLAIN = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %} {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}
{{- '\\n' }}
{%- endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
]


def make_tokenizer(template: str | None) -> Any:
    """Return a tokenizer with ``template`` as its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    inner.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer

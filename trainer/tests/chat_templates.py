"""Small chat templates with the structure of well-known ones, and a tokenizer with their special tokens."""

from __future__ import annotations

import re
import string

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN3 = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- set text = message.content or '' %}{% set thought = message.reasoning_content or '' %}
    {%- if not thought and '</think>' in text %}
      {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
      {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last and (loop.last or thought) %}
      {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- text }}
    {%- for call in message.tool_calls or [] %}
      {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
      {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
      {{- '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
  {%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
  {%- set role = 'ipython' if message.role == 'tool' else message.role %}
  {{- '<|start|>' + role + '<|sep|>\\n\\n' }}
  {%- if loop.first and tools %}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{% endif %}
  {%- if message.tool_calls %}
    {%- set call = message.tool_calls[0].function %}
    {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
  {%- elif message.role == 'tool' %}{{ message.content | tojson }}
  {%- else %}{{ message.content | trim }}
  {%- endif %}
  {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|sep|>\\n\\n' }}{% endif %}"""

R1 = """\
{{- bos_token }}
{%- set ns = namespace(tool=false) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{{ '<|User|>' + message.content }}{% endif %}
  {%- if message.role == 'assistant' and message.tool_calls %}
    {%- for call in message.tool_calls %}
      {{- '<|Assistant|><|call|>' + call.function.name + '\\n' + call.function.arguments + '<|/call|>' }}
    {%- endfor %}
    {{- eos_token }}
  {%- endif %}
  {%- if message.role == 'assistant' and message.content is not none %}
    {%- if ns.tool %}{{ '<|/out|>' + message.content + eos_token }}{% set ns.tool = false %}
    {%- else %}{{ '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}
    {%- endif %}
  {%- endif %}
  {%- if message.role == 'tool' %}{% set ns.tool = true %}{{ '<|out|>' + message.content }}{% endif %}
{%- endfor %}
{%- if ns.tool %}{{ '<|/out|>' }}{% elif add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

GEMMA3 = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}
  {%- set ns.system = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}
{%- endif %}
{%- for message in turns %}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
  {{- '<|turn|>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
  {{- ns.system if loop.first }}
  {%- if message.content is string %}{{ message.content | trim }}
  {%- else %}{% for part in message.content %}{{ part.text | trim }}{% endfor %}
  {%- endif %}
  {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>model\\n' }}{% endif %}"""

GPT_OSS = """\
{%- if tools %}{{ '<|start|>developer<|message|>' }}
  {%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|end|>' }}
{%- endif %}
{%- set ns = namespace(name='') %}
{%- for message in messages %}
  {%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | list | length %}
  {%- if message.role == 'assistant' %}
    {%- set last = loop.last and not add_generation_prompt %}
    {%- if message.thinking and (last or (message.tool_calls and not later)) %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
    {%- endif %}
    {%- if message.tool_calls %}
      {%- set call = message.tool_calls[0].function %}{% set ns.name = call.name %}
      {{- '<|start|>assistant to=' + call.name + '<|channel|>commentary<|message|>' }}
      {{- call.arguments | tojson + '<|call|>' }}
    {%- else %}
      {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
      {{- '<|return|>' if last else '<|end|>' }}
    {%- endif %}
  {%- elif message.role == 'tool' %}
    {{- '<|start|>' + ns.name + '<|message|>' + message.content | tojson + '<|end|>' }}
  {%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}
{%- endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- for message in turns %}
  {%- if message.role == 'user' %}
    {%- if tools and message == users[-1] %}{{ '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{% endif %}
    {{- '[INST]' + (system if message == users[-1] else '') + message.content + '[/INST]' }}
  {%- elif message.role == 'tool' %}{{ '[RESULTS]' + message.content + '[/RESULTS]' }}
  {%- elif message.tool_calls %}
    {{- '[CALLS][' }}
    {%- for call in message.tool_calls %}{{ ', ' if not loop.first }}{{ call.function | tojson }}{% endfor %}
    {{- ']' + eos_token }}
  {%- else %}{{ message.content + eos_token }}
  {%- endif %}
{%- endfor %}"""

TEMPLATES = {
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "r1": R1,
    "gemma3": GEMMA3,
    "gpt-oss": GPT_OSS,
    "mistral": MISTRAL,
}
END = {
    "qwen3": "<|im_end|>",
    "llama3": "<|eot|>",
    "r1": "</s>",
    "gemma3": "<|end|>",
    "gpt-oss": "<|return|>",
    "mistral": "</s>",
}
"""The end-of-sequence token of each template."""


def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of characters, with the special tokens of the template ``name``."""
    special = sorted(set(re.findall(r"<\|[^|<>]+\|>|\[/?[A-Z]+\]", TEMPLATES[name])))
    tokens = ["<pad>", "<s>", "</s>", *special, *string.printable]
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in tokens[: 3 + len(special)]]
    )
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=END[name], pad_token="<pad>"
    )
    fast.chat_template = TEMPLATES[name]
    return fast

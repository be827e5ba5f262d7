"""Chat templates: the template of a tokenizer, its arguments, and the text that it renders."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables

from core_rl.errors import BatchError, ConfigError, CoreRLError
from core_rl_trainer.data.messages import (
    REASONING,
    Message,
    in_any_place,
    message_forms,
    misplaced_reply,
    missing_text,
    shortened,
)
from core_rl_trainer.data.pieces import leading_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLOCK = "strftime_now"
"""The function with which a template reads the time."""
TIME_CODES = ("-d", "-m", "-H", "-I", *"aAbBcdeHIjmMpSuUwWxXyYzZ", "%")
"""Codes of its formats, after %."""

Rendered = list[dict[str, Any]]
"""Messages in a form that a template takes."""


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """A tokenizer with the settings of its chat template."""

    tokenizer: PreTrainedTokenizerBase
    template_name: str | None = None
    """The template of a tokenizer that has several."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template; the arguments of an example take precedence."""
    time: datetime | None = None
    """The time that ``strftime_now`` of a template formats; None for the time of the call."""
    ends: frozenset[int] = frozenset()
    """Token ids that end a completion."""

    @cached_property
    def closing(self) -> frozenset[int]:
        """Token ids that may close a turn: the ends, and the special tokens with which templates do."""
        from core_rl.checkpoint.end_tokens import special_tokens

        return self.ends | special_tokens(self.tokenizer).keys()

    @cached_property
    def leading(self) -> list[int]:
        """The special tokens with which each sequence begins."""
        return leading_ids(self.tokenizer)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the chat templates read."""
        templates = self.tokenizer.chat_template or ""
        texts = [templates] if isinstance(templates, str) else templates.values()
        return frozenset().union(*map(_variables, texts))

    def opened(self, ids: list[int]) -> list[int]:
        """``ids`` behind the leading tokens, once, also where a template or text spells them out."""
        leading = self.leading or [self.tokenizer.bos_token_id]
        size = len(leading)
        while ids[: 2 * size] == 2 * leading:
            ids = ids[size:]
        return ids if ids[:size] == leading else self.leading + ids

    def template(self, example: Mapping[str, Any]) -> ChatTemplate:
        """The template for one example, with its tools, documents and arguments.

        Raises `ConfigError` for a missing template and an argument that it does not read, and `BatchError` for tools,
        documents or arguments of the example.
        """
        tools = _tools_of(example)
        name, text = self._template(tools is not None)
        _check_arguments(ConfigError, "data.template_args", self.arguments, name, text)
        arguments = example.get("chat_template_kwargs") or {}
        if not isinstance(arguments, Mapping):
            raise BatchError(f"has 'chat_template_kwargs' that are no object: {shortened(arguments)}")
        arguments = {name: value for name, value in arguments.items() if value is not None}
        _check_arguments(BatchError, "chat_template_kwargs", arguments, name, text)
        fields = {"tools": tools, "documents": example.get("documents")}
        fields = {name: value for name, value in fields.items() if value}
        for field_name in fields:
            if field_name not in _names(text):
                raise BatchError(
                    f"has {field_name!r}, which the chat template{name} does not show to the model; take a template "
                    "that reads them, or remove the column"
                )
        return ChatTemplate(
            tokenizer=self.tokenizer,
            text=text if self.time is None else _at_time(text, self.time),
            arguments={**self.arguments, **arguments, **fields},
        )

    def _template(self, has_tools: bool) -> tuple[str, str]:
        """The name of the template, for messages, and its text."""
        templates, name = self.tokenizer.chat_template, self.template_name
        path = self.tokenizer.name_or_path
        if not templates:
            raise ConfigError(
                f"{path!r}: its tokenizer has no chat template, and the data has chat messages; add a "
                "chat_template.jinja to the model's directory, or write each prompt as a text"
            )
        if isinstance(templates, str):
            if name is not None:
                raise ConfigError(
                    f"data.chat_template = {name!r} names one of several templates, and the tokenizer has one; "
                    "write a template of yours as chat_template.jinja in the model's directory, or remove the field"
                )
            return "", templates
        name = name or ("tool_use" if has_tools and "tool_use" in templates else "default")
        if name not in templates:
            raise ConfigError(
                f"{path!r}: its tokenizer has no chat template {name!r}; set data.chat_template to "
                f"{' or '.join(map(repr, templates))}"
            )
        return f" {name!r}", templates[name]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template with its arguments."""

    tokenizer: PreTrainedTokenizerBase
    text: str
    arguments: Mapping[str, Any]

    def formed(self, messages: Sequence[Message], *, to_be_continued: bool) -> Rendered:
        """``messages`` in the first form that the template renders as a whole; `BatchError` where it takes none."""
        if "tool_call_id" not in self.text and (reply := misplaced_reply(messages)) is not None:
            raise BatchError(
                f"has the reply to the tool call {reply!r} before that to an earlier call, and the chat template shows "
                "no 'tool_call_id'; put the replies in the order of the calls"
            )
        refused: BatchError | None = None
        incomplete: Rendered | None = None
        reasoning = next((name for name in REASONING if re.search(rf"\b{name}\b", self.text)), None)
        for alternatives in message_forms(messages, reasoning):
            complete: list[tuple[int, Rendered]] = []
            for form in alternatives:
                try:
                    rendered = self.render(form, to_be_continued=to_be_continued)
                except BatchError as error:
                    refused = refused or error
                    continue
                incomplete = incomplete or form
                if not any(missing_text(in_any_place(message), rendered) for message in form):
                    complete.append((len(rendered), form))
            if complete:  # the longer one has "None", or a second turn
                return min(complete, key=itemgetter(0))[1]
        if incomplete is None:
            assert refused is not None
            raise refused
        return incomplete  # a missing text is named with its turn

    def shows(self, messages: Sequence[Message], name: str) -> bool:
        """Whether the field ``name`` of ``messages`` changes their text, or whether they are refused without it."""
        if name not in self.text:
            return False
        without = [{field: turn[field] for field in turn if field != name} for turn in messages]
        try:
            forms = [self.formed(chat, to_be_continued=False) for chat in (messages, without)]
            return len({self.render(form, to_be_continued=False) for form in forms}) == 2
        except BatchError:
            return True

    def render(self, messages: Rendered, *, to_be_continued: bool) -> str:
        """The text of ``messages``, as a prompt or as a conversation. Raises `BatchError` where it is refused."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # `apply_chat_template` removes null content, by which R1's template knows a tool call.
        arguments = {**self.tokenizer.special_tokens_map, **self.arguments}
        try:
            rendered = render_jinja_template(
                conversations=[messages],
                chat_template=self.text,
                add_generation_prompt=to_be_continued,
                **arguments,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise BatchError(f"the chat template refuses these messages: {error}") from error
        return str(rendered[0][0])


def _at_time(text: str, time: datetime) -> str:
    """The template ``text`` at ``time``: with a macro, since the arguments of a template are plain data."""
    formatted = "".join(f"|replace('%{code}', {time.strftime(f'%{code}')!r})" for code in TIME_CODES)
    return f"{{% macro {CLOCK}(format) %}}{{{{ format{formatted} }}}}{{% endmacro %}}\n{text}"


def _tools_of(example: Mapping[str, Any]) -> list[Any] | None:
    """The schemas of the tools of an example, also from JSON text of all or each. Raises `BatchError` for others."""
    tools = example.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
        if isinstance(tools, list):
            tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]
    except ValueError as error:
        raise BatchError(f"has 'tools' that are no JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BatchError(f"has 'tools' that are no list of schemas: {shortened(tools)}")
    return tools


def _check_arguments(
    error: type[CoreRLError], subject: str, arguments: Mapping[str, Any], name: str, text: str
) -> None:
    """Raise ``error`` for an argument that the template never reads."""
    for argument in arguments:
        if argument not in _names(text):
            near = get_close_matches(argument, _names(text), 1)
            hint = f"did you mean {near[0]!r}?" if near else "remove it"
            raise error(f"{subject}: the chat template{name} does not read {argument!r}; {hint}")


def _variables(text: str) -> set[str]:
    """The variables of a template; none where it cannot be read, which rendering refuses."""
    with suppress(TemplateError):
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)
        return find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain))
    return set()


@lru_cache(maxsize=64)
def _names(text: str) -> frozenset[str]:
    """The names in the code of a template. Raises `ConfigError` for a text that is no template."""
    try:
        tokens = list(Environment().lex(text))
    except TemplateError as error:
        raise ConfigError(f"the chat template is no template of jinja: {error}") from error
    return frozenset(value for _, kind, value in tokens if kind == "name")

"""The grammar that an answer has to follow: JSON for `response_format`, and calls whose arguments fit their schemas
where `tool_choice` demands one or a tool is strict."""

from __future__ import annotations

from typing import Any

from models import GrammarError, LoadedModel
from models.grammar import ANY_TEXT, Grammar, json_rule, tag_rule, text_rule, until_rule
from models.tokenizer import Tokenizer
from serving import reasoning, tool_calls
from serving.chat_request import ChatRequest
from serving.errors import ApiError, bad_request
from serving.tools import AFTER_NAME, BEFORE_NAME, BETWEEN, END, Function, named_of

GAP = r"/\s{0,4}/"  # what models write between reasoning and answer


def compile_answer_grammar(model: LoadedModel, request: ChatRequest, *, in_reasoning: bool) -> Grammar | None:
    """The grammar of what the model is to write; None if that may be anything. `in_reasoning` tells that the prompt has
    opened the reasoning.

    Raises:
        ApiError: 400 for a schema that no answer can be held to; `param` names its field.
    """
    rules = _Rules(request, model.tokenizer)
    start = rules.start(in_reasoning)
    if start is None:
        return None
    try:
        return model.compile_grammar("\n".join([f"start: {start}", *rules.lines]))
    except GrammarError as error:
        raise _blame(model, rules.schemas) or bad_request(str(error), next(iter(rules.schemas), None)) from None


def _blame(model: LoadedModel, schemas: dict[str, str]) -> ApiError | None:
    """The error for the first schema that is wrong by itself."""
    for param, rule in schemas.items():
        try:
            model.compile_grammar(f"start: {rule}")
        except GrammarError as error:
            return _unusable(param, error)
    return None


def _unusable(param: str, error: GrammarError) -> ApiError:
    return bad_request(f"'{param}': no answer can be held to this schema: {error}", param)


class _Rules:
    """The `lines` of a request's grammar, each of which defines a rule, and the rules of `schemas` by their fields."""

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer) -> None:
        self.lines: list[str] = []
        self.schemas: dict[str, str] = {}
        self._request = request
        self._tokenizer = tokenizer

    def start(self, in_reasoning: bool) -> str | None:
        """What an answer is, in terms of the lines, which it defines; None if it may be anything."""
        request = self._request
        if request.opening:  # with it the prompt ends
            self._define_calls()
            return "named more" if request.tool_choice == "required" else "arguments_0"
        if request.answer_schema is not None:
            self.lines.append(f"answer: {self._schema('response_format', request.answer_schema)}")
            answer, may_reason = "answer", request.template_settings.get("enable_thinking") is True
            if request.callable_tools:
                self._define_calls()
                answer = "(answer | call more)"
        elif any(function.strict for function in self._functions().values()):
            self._define_calls()
            self.lines.append(until_rule("text_and_tag", tool_calls.OPEN, self._tokenizer))
            self.lines.append(f"text: {ANY_TEXT}")
            answer, may_reason = "(text_and_tag body)* text", True
        else:
            return None
        return self._after_reasoning(answer, in_reasoning, may_reason)

    def _after_reasoning(self, answer: str, opened: bool, may_open: bool) -> str:
        if not opened and not may_open:
            return answer
        self.lines.append(until_rule("reasoning", reasoning.CLOSE, self._tokenizer))
        if opened:
            return f"reasoning {GAP} {answer}"
        return f"({tag_rule(reasoning.OPEN, self._tokenizer)} reasoning {GAP})? {answer}"

    def _functions(self) -> dict[str, Function]:
        """What may be called, by the field in which it stands."""
        choice, tools = self._request.tool_choice, self._request.tools or []
        functions = {f"tools.{index}.function": tool.function for index, tool in enumerate(tools)}
        if isinstance(choice, dict):
            return {param: function for param, function in functions.items() if function.name == named_of(choice)}
        return {} if choice == "none" else functions

    def _define_calls(self) -> None:
        """Defines `call`, a complete one; `body`, what follows on its tag; `named`, what follows on the text before its
        name; `arguments_0` and so on, what follows on the text after that; and `more`, further calls."""
        opening, closing = (tag_rule(tag, self._tokenizer) for tag in (tool_calls.OPEN, tool_calls.CLOSE))
        named = []
        for index, (param, function) in enumerate(self._functions().items()):
            arguments = self._arguments(f"{param}.parameters", function)
            self.lines.append(f"arguments_{index}: {text_rule(' ')} {arguments} {text_rule(END)} {closing}")
            named.append(f"{text_rule(function.name + AFTER_NAME)} arguments_{index}")
        self.lines += [
            f"named: {' | '.join(named)}",
            f"body: {text_rule(BEFORE_NAME.removeprefix(tool_calls.OPEN))} named",
            f"call: {opening} body",
            f"more: {'' if self._request.parallel_tool_calls is False else f'({text_rule(BETWEEN)} call)*'}",
        ]

    def _arguments(self, param: str, function: Function) -> str:
        """The rule for the arguments of a function: an object, empty if it has no parameters. Without `strict`,
        keywords that the grammar lacks are ignored, since they may have been meant as advice to the model only."""
        schema = function.parameters or {"additionalProperties": False}
        return self._schema(param, schema | {"type": "object"}, lenient=function.strict is not True)

    def _schema(self, param: str, schema: dict[str, Any], *, lenient: bool = False) -> str:
        try:
            self.schemas[param] = json_rule(schema, lenient=lenient)
        except GrammarError as error:
            raise _unusable(param, error) from None
        return self.schemas[param]

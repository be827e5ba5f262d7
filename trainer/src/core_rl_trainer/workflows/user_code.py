"""User functions of a run: rewards, environment and filter, loaded early and opened with the engines."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from core_rl.distributed.loop_thread import LoopThread
from core_rl.errors import ConfigError, RolloutError
from core_rl.rollout.workflow import AcceptFn
from core_rl_trainer.environments import Environment
from core_rl_trainer.rewards.calls import UserThreads, call_on_loop, call_user, guarded, name_of
from core_rl_trainer.rewards.config import RewardSection
from core_rl_trainer.rewards.functions import load_callable
from core_rl_trainer.rewards.http import HttpReward, is_url
from core_rl_trainer.rewards.process import ProcessReward
from core_rl_trainer.rewards.terms import RewardTerm, WeightedRewards
from core_rl_trainer.rewards.text import NamedReward, TextReward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLOSE_TIMEOUT_S = 1.0
"""Time limit for closing the event loop of rewards, in seconds; a blocked loop ends with the process."""
PART = re.compile("answers?|completions|gold|ground_truth|labels?|responses|solutions?|solution_str|target")
"""The second argument of other tools' rewards: a part of the sample, or a completion."""


@dataclass(frozen=True, kw_only=True)
class LoadedCode:
    """Functions that a recipe names, loaded."""

    sections: tuple[RewardSection, ...]
    rewards: Mapping[tuple[str, bool], Callable[..., Any]]
    """Functions by the name in the recipe, and whether they are batched."""
    environment: Callable[..., Environment] | None
    should_accept: AcceptFn | None


@dataclass(frozen=True, kw_only=True)
class UserCode:
    """The same, ready to be called by workflows."""

    reward: WeightedRewards
    environment: Callable[[], Environment] | None = None
    should_accept: AcceptFn | None = None


def load_user_code(
    rewards: Mapping[str, RewardSection], environment: str | None, should_accept: str | None
) -> LoadedCode:
    """The functions of ``rewards``, which are given by field, the environment and the filter. Raises `ConfigError`."""
    return LoadedCode(
        sections=tuple(rewards.values()),
        rewards={section.call: _loaded(field, *section.call) for field, section in rewards.items()},
        environment=_environment(environment),
        should_accept=None
        if should_accept is None
        else load_callable("rollout.should_accept", should_accept),
    )


def _loaded(field: str, name: str, batched: bool) -> Callable[..., Any]:
    if is_url(name):
        return HttpReward(name, batched)
    function: Callable[..., Any] = load_callable(field, name)
    tests = (inspect.isclass, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(test(function) for test in tests):
        raise ConfigError(
            f"{field} = {name!r} returns an object or a generator, no number; name a function that returns one"
        )
    texts = "the list of the texts of a prompt's completions" if batched else "the text of a completion"
    fix = f"a reward is called with {texts} and its sample, so wrap it in a function of these two"
    _check_arguments(f"{field} = {name!r}", function, ("", {}), fix)
    return function


def _check_arguments(subject: str, function: Callable[..., Any], args: tuple[object, ...], fix: str) -> None:
    """Raise `ConfigError` where ``function`` does not take as many arguments as ``args``, or another second one."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without one
        return
    try:
        names = [*signature.bind(*args).arguments]
    except TypeError as error:
        raise ConfigError(f"{subject} takes {signature}: {error}; {fix}") from error
    if len(names) > 1 and PART.fullmatch(names[1]):
        raise ConfigError(f"{subject} takes {signature}: it would get the sample as {names[1]!r}; {fix}")


def _environment(name: str | None) -> Callable[..., Environment] | None:
    if name is None:
        return None
    subject = f"rollout.environment = {name!r}"
    make: Callable[..., Environment] = load_callable("rollout.environment", name)
    fix = "it is called with the tokenizer, and returns an environment, such as ToolEnvironment(tokenizer, tool)"
    _check_arguments(subject, make, (None,), fix)
    if inspect.iscoroutinefunction(make):
        raise ConfigError(f"{subject} is a coroutine function; write it as a plain one: {fix}")
    if inspect.isclass(make) and (problem := _method_problem(make)):
        raise ConfigError(f"{subject} is a class {problem}")
    return make


def check_environment(
    make: Callable[..., Environment], tokenizer: PreTrainedTokenizerBase, timeout_s: float
) -> None:
    """Make an environment, on an event loop as episodes do; raises `ConfigError` where this fails."""
    loop = LoopThread("core-rl-rewards")
    environment = _EnvironmentOnLoop(make, tokenizer, loop)
    subject = f"rollout.environment: {environment.__name__}"
    function = make.__init__ if inspect.isclass(make) else make  # whose line is named
    try:
        loop.run(guarded(environment.made(), subject=subject, function=function)).result(timeout_s)
    except TimeoutError as error:
        raise ConfigError(
            f"{subject} is not made in {timeout_s:g} s; raise rollout.step_timeout_s"
        ) from error
    except RolloutError as error:
        raise ConfigError(str(error).partition("\n")[0]) from error
    finally:
        _close_loop(loop)


def _method_problem(environment: object) -> str | None:
    """Methods of an environment, or of its class, that are no coroutine functions."""
    methods = {name: getattr(environment, name, None) for name in ("reset", "step", "close")}
    wrong = [
        name
        for name, method in methods.items()
        if not inspect.iscoroutinefunction(getattr(method, "__wrapped__", method))
    ]
    return f"without `async def` of {', '.join(wrong)}; write it so" if wrong else None


@contextmanager
def open_user_code(
    loaded: LoadedCode,
    tokenizer: PreTrainedTokenizerBase,
    *,
    reward_processes: int,
    reward_timeout_s: float | None,
    skip_special_tokens: bool,
) -> Iterator[UserCode]:
    """``loaded``, ready to be called; its processes and its event loop end with the context."""
    with ExitStack() as stack:
        loop, threads = LoopThread("core-rl-rewards"), UserThreads()
        stack.callback(_close_loop, loop)
        opened: dict[tuple[str, bool], Callable[..., Any]] = {}
        for (name, batched), function in loaded.rewards.items():
            as_text = partial(
                TextReward, tokenizer=tokenizer, skip_special_tokens=skip_special_tokens, batched=batched
            )
            if reward_processes and not isinstance(function, HttpReward):
                assert reward_timeout_s is not None  # the recipe requires both
                process = ProcessReward(
                    NamedReward(name), processes=reward_processes, timeout_s=reward_timeout_s, batched=batched
                )
                opened[name, batched] = _OnLoop(as_text(stack.enter_context(process)), None, threads)
            else:
                if isinstance(function, HttpReward):
                    stack.callback(_close_endpoint, loop, function)
                opened[name, batched] = _OnLoop(as_text(function), loop, threads)
        terms = tuple(
            RewardTerm(
                name=section.label,
                function=opened[section.call],
                weight=section.weight,
                batched=section.batched,
            )
            for section in loaded.sections
        )
        yield UserCode(
            reward=WeightedRewards(terms),
            environment=None
            if loaded.environment is None
            else partial(_EnvironmentOnLoop, loaded.environment, tokenizer, loop),
            should_accept=loaded.should_accept,
        )


class _OnLoop:
    """A function in ``threads`` whose coroutines run on ``loop``, that of rewards, or else on the caller's.

    So a blocking call does not stall the generation, and clients that functions keep belong to one loop.
    """

    def __init__(self, function: Any, loop: LoopThread | None, threads: UserThreads) -> None:
        self.__name__ = name_of(function)
        self.__wrapped__ = function
        self._loop, self._threads = loop, threads

    async def __call__(self, *args: Any) -> Any:
        return await call_user(self.__wrapped__, *args, loop=self._loop, threads=self._threads)


class _EnvironmentOnLoop:
    """An environment that is made on the loop of rewards and runs there, with the tools and rubrics that it calls."""

    def __init__(
        self, make: Callable[..., Environment], tokenizer: PreTrainedTokenizerBase, loop: LoopThread
    ) -> None:
        self.__name__ = name_of(make)
        self.__wrapped__ = getattr(make, "step", make)
        self._make, self._run = partial(make, tokenizer), partial(call_on_loop, loop)
        self._environment: Environment | None = None

    async def made(self) -> Environment:
        """A new environment; on the loop."""
        environment = self._make()
        if problem := _method_problem(environment):
            raise RolloutError(f"is a {type(environment).__name__} {problem}")
        return environment

    async def _reset(self, data: Mapping[str, Any]) -> Sequence[int]:
        self._environment = await self.made()
        return await self._environment.reset(data)

    async def reset(self, data: Mapping[str, Any]) -> Any:
        return await self._run(self._reset, data)

    async def step(self, output_ids: Sequence[int]) -> Any:
        assert self._environment is not None  # of `reset`
        return await self._run(self._environment.step, output_ids)

    async def close(self) -> None:
        if self._environment is not None:
            await self._run(self._environment.close)


def _close_endpoint(loop: LoopThread, reward: HttpReward) -> None:
    closing = loop.run(reward.close())
    with suppress(TimeoutError):  # the loop is blocked
        closing.result(CLOSE_TIMEOUT_S)


def _close_loop(loop: LoopThread) -> None:
    with suppress(RolloutError):  # a reward blocks it: its thread ends with the process
        loop.close(CLOSE_TIMEOUT_S)

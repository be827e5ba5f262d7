"""The plan of a run on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from core_rl_trainer.data.tokenizers import describe_end_tokens
from core_rl_trainer.plan.report import PlanReport, RoleReport

MEMORY = ("weights", "gradients", "moments", "transient", "activations", "logits", "total")


def print_plan(plan: PlanReport, console: Console | None = None) -> None:
    """Print the work of the run, of each role and its ranks, and the memory that a rank needs."""
    console = console or Console(highlight=False)
    console.print(_run(plan))
    console.print(_roles(plan.roles))
    console.print(_by_role("memory of a rank", plan.roles, {name: partial(_part, name) for name in MEMORY}))
    if plan.colocated:
        console.print("Roles that share devices are offloaded while another one works.")
        for text in _sharing(plan.roles):
            console.print(text)
        console.print()
    for text in plan.data.preview:
        console.print("[bold]first example[/], trained tokens in ⟦ ⟧:")
        console.print(text, markup=False, soft_wrap=True)
    for remark in plan.remarks:
        console.print(f"[yellow]remark:[/] {escape(remark)}", soft_wrap=True)
    console.print(
        "Nothing was started; the memory is an estimate, without what frameworks take for themselves."
    )


def _run(plan: PlanReport) -> Table:
    workload, old = plan.workload, plan.off_policyness
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False, caption=" ")
    updates = "1 update" if workload.updates_per_step == 1 else f"{workload.updates_per_step} updates"
    product = f"{workload.examples_per_step:,} examples * {workload.sequences_per_example}"
    sequences = f"{product} = {plan.sequences_per_step:,} sequences"
    rows = (
        ("algorithm", plan.algorithm + (f", completions at most {old} versions old" if old else "")),
        ("data", f"{workload.examples:,} examples to train on, {workload.held_out:,} held out"),
        ("", plan.data.sources),
        ("steps", f"{plan.steps:,}, with {updates} each: {plan.passes:.3g} passes over the data"),
        (
            "each step",
            f"{sequences} of at most {workload.longest:,} tokens, at most {plan.tokens_per_step:,} in all",
        ),
        ("end tokens", describe_end_tokens(plan.end_tokens)),
        ("micro-batch", f"at most {plan.micro_batch_tokens:,} tokens"),
        ("besides", f"{plan.evaluations} evaluations, {plan.checkpoints} checkpoints, in {plan.output_dir}"),
        ("cluster", plan.cluster),
    )
    for name, text in rows:
        table.add_row(f"[bold]{name}[/]", escape(text))
    return table


def _roles(roles: Sequence[RoleReport]) -> Table:
    """A column for each role: a row for each would be cut at the width of a terminal."""
    rows: dict[str, Callable[[RoleReport], str]] = {
        "engine": lambda role: role.engine,
        "layout": lambda role: role.layout,
        "dtype": lambda role: role.dtype,
        "device": lambda role: f"{role.device} {role.place}".strip(),
        "weights": lambda role: f"{role.model.parameters:,}",
        "trained": lambda role: f"{role.model.trained if role.memory.moments else 0:,}",
        "layers": lambda role: f"{role.model.layers:,}",
        "vocabulary": lambda role: f"{role.model.vocabulary:,}",
        "ranks": lambda role: f"{role.ranks:,}" if role.ranks else "",
        "sequences of a rank": lambda role: f"at most {role.sequences:,}" if role.ranks else "",
        "micro-batches": lambda role: f"at most {role.micro_batches:,}" if role.ranks else "",
    }
    return _by_role("role", roles, rows)


def _by_role(
    heading: str, roles: Sequence[RoleReport], rows: Mapping[str, Callable[[RoleReport], str]]
) -> Table:
    columns = (role.role for role in roles)
    table = Table(heading, *columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, caption=" ")
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", *(escape(value(role)) for role in roles))
    return table


def _sharing(roles: Sequence[RoleReport]) -> Iterator[str]:
    """The roles that live in the same processes."""
    for role in roles:
        colocated = [candidate.role for candidate in roles if candidate.colocated_with == role.role]
        if colocated:
            count = "1 process" if role.ranks == 1 else f"{role.ranks} processes"
            *some, last = [role.role, *colocated]
            yield f"{', '.join(some)} and {last} live in the same {count}."


def _part(name: str, role: RoleReport) -> str:
    """This part of the role's memory; an inference engine has weights and plans its cache itself."""
    if role.ranks or name == "weights":
        return _size(getattr(role.memory, name))
    return "and its cache" if name == "total" else ""


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.3g} GiB"

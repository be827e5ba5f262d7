"""Reproductions of failures: scripts in plain torch and transformers that compute expected values again, in float64.

Each has at most 40 lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import transformers
from torch import Tensor

from core_rl_conformance.inputs.data import Ragged, Row
from core_rl_conformance.inputs.losses import (
    CheckLoss,
    OutputsLoss,
    RewardLoss,
    SequenceMeanLoss,
    TokenMeanLoss,
    ValueLoss,
)
from core_rl_conformance.inputs.tiny_models import LOGIT_STD, MAX_LENGTH, TinyModel
from core_rl_conformance.profile import MIXTURES
from core_rl_oracle.tolerance import Tolerance

LOSSES = (TokenMeanLoss, SequenceMeanLoss, OutputsLoss, ValueLoss, RewardLoss)
"""Losses that scripts can compute; not their subclasses."""
NO_SEQUENCES = Ragged(())
OUTPUTS = ("logprobs", "entropy", "logits", "values", "bootstrap", "scores")
SHOWN_TENSORS = 6
SHOWN_ELEMENTS = 4
"""Largest errors of a tensor."""
SMALLEST = 1e-300
"""Stands for a limit of 0."""
HEADING = 300
"""Characters of the first line."""
DIRECTORY = "tiny-model"
OF_SCALARS = (ValueLoss, RewardLoss)
TERMS = {
    "logprobs": "-logprobs",
    "entropy": "entropy",
    "logits": "(log_p.exp() * costs).sum(-1)[at] + (logits * costs).mean(-1)[at]",
}
"""Terms of `OutputsLoss`."""


class Output(NamedTuple):
    """An output of every sequence."""

    name: str
    temperature: float


class HiddenStates(NamedTuple):
    """The states of every token after a layer; 0 is before the first."""

    layer: int


class Weights(NamedTuple):
    """The drawn weights, or their names and shapes alone."""

    shapes_only: bool = False


Quantity = Output | HiddenStates | CheckLoss | Weights


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Model, sequences and quantity: an output, the loss and its gradients, or the weights."""

    model: TinyModel
    data: Ragged
    quantity: Quantity


def computation_of(of: object, quantity: Quantity, data: Ragged = NO_SEQUENCES) -> Computation | None:
    """The computation; None where a short script cannot make the model, read the sequences or compute the quantity.

    Drawn mixtures, vision-language models, adapters, variants of a given model and models for bfloat16 are out of
    reach.
    """
    if not isinstance(of, TinyModel) or of.vision or (of.family in MIXTURES and not of.source):
        return None
    if of.source and of != TinyModel(family=of.family, source=of.source):
        return None
    if of.exact or of.focused or not (_computes(quantity) and all(map(_plain, data.rows))):
        return None
    return Computation(model=of, data=data, quantity=quantity)


def _computes(quantity: Quantity) -> bool:
    if isinstance(quantity, Output):
        return quantity.name in OUTPUTS
    return isinstance(quantity, Weights | HiddenStates) or type(quantity) in LOSSES


def _plain(row: Row) -> bool:
    return row.routing is None and row.images is None and row.copies == 1


def reproduction(
    computation: Computation,
    heading: tuple[str, str],
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerances: Mapping[str, Tolerance],
) -> str:
    """A script that prints the expected values, and the engine's where ``got`` is off.

    The script saves the model to the directory `DIRECTORY`.
    """
    versions = f"torch {torch.__version__} and transformers {transformers.__version__}"
    lines = [
        f"# {heading[0][:HEADING]}",
        f"# {heading[1]} It needs nothing but {versions}.",
        *(["import hashlib"] if isinstance(computation.quantity, Weights) else []),
        *_model(computation.model),
        f"GOT = {_got(got, expected, tolerances)}  # values of the engine, by tensor and flat index",
        *_expected(computation),
        "for name, value in expected.items():",
        f"    print(name, list(value.shape), {_shown(computation)})",
        "    for index, got in GOT.get(name, {}).items():",
        '        print(f"  [{index}] expected {value.flatten()[index]:.9g}, the engine gave {got:.9g}")',
    ]
    return "\n".join(lines) + "\n"


def _shown(computation: Computation) -> str:
    """An expression of a printed value: the numbers, or for weights a digest of their bytes in float32."""
    if not isinstance(computation.quantity, Weights):
        return f"value.tolist() if value.numel() <= {MAX_LENGTH} else float(value.norm())"
    return '""' if computation.quantity.shapes_only else "hashlib.sha256(value.numpy().tobytes()).hexdigest()"


def _got(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerances: Mapping[str, Tolerance]
) -> str:
    """Python's text of the values that are off most, by tensor and flat index; the worst tensors first."""
    parts: dict[str, float] = {}
    for name, value in expected.items():
        if name not in got or got[name].shape != value.shape:
            continue
        values = got[name].double().flatten()
        errors = (values - value.double().flatten()).abs().nan_to_num(nan=math.inf)
        worst = errors.argsort(descending=True)[:SHOWN_ELEMENTS].tolist()
        wrong = [
            f"{index}: {_number(float(values[index]))}"
            for index in sorted(worst)
            if not tolerances[name].allows(float(errors[index]))
        ]
        if wrong:
            ratio = float(errors.max()) / max(tolerances[name].limit, SMALLEST)
            parts[f'"{name}": {{{", ".join(wrong)}}}'] = ratio
    return f"{{{', '.join(sorted(parts, key=lambda part: -parts[part])[:SHOWN_TENSORS])}}}"


def _number(value: float) -> str:
    return f"{value:.9g}" if math.isfinite(value) else f'float("{value}")'


def _model(model: TinyModel) -> Iterator[str]:
    """The model in float32 as it is drawn, or lies in a directory, and again in float64."""
    kind = "AutoModelForCausalLM" if model.head == "lm" else "AutoModelForSequenceClassification"
    yield "import torch"
    yield f"from transformers import AutoConfig, {kind}"
    yield from _given(model.source) if model.source else _drawn(model, kind)
    yield "torch.float = torch.float32 = torch.float64  # transformers casts norms, softmax and positions to float32"
    yield "torch.Tensor.float = torch.Tensor.double"
    yield "torch.set_default_dtype(torch.float64)"
    yield "model = build()"
    yield "model.load_state_dict(tiny.state_dict())"


def _given(directory: str) -> Iterator[str]:
    yield "from transformers.core_model_loading import revert_weight_conversion"
    yield f"tiny = AutoModelForCausalLM.from_pretrained({directory!r}, dtype=torch.float32)"
    yield "def build():"
    yield '    kwargs = {"attn_implementation": "eager", "experts_implementation": "eager"}'
    yield "    return AutoModelForCausalLM.from_config(tiny.config, dtype=torch.float64, **kwargs).eval()"


def _drawn(model: TinyModel, kind: str) -> Iterator[str]:
    vector, matrix = _draws(model)
    config = model.config().to_diff_dict()
    yield f"CONFIG = { {name: value for name, value in config.items() if name != 'transformers_version'} }"
    yield "def build():"
    yield f'    return {kind}.from_config(AutoConfig.for_model(**CONFIG), attn_implementation="eager").eval()'
    yield "tiny = build()"
    buffers = "*(pair for pair in tiny.named_buffers() if pair[0] in tiny.state_dict())"
    yield f"for name, parameter in [*tiny.named_parameters(), {buffers}]:"
    yield "    seed = 0"
    yield f'    for byte in f"{model.family}/{model.seed}/{{name}}".encode():'
    yield "        seed = (seed * 131 + byte) % (2**61 - 1)"
    yield "    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))"
    yield f'    vector = 0.1 * noise if name.endswith("bias") else {vector}'
    yield f"    parameter.data = vector if noise.dim() == 1 else {matrix}"
    yield f'tiny.save_pretrained("{DIRECTORY}")  # for the engine'


def _draws(model: TinyModel) -> tuple[str, str]:
    """Expressions of a norm's weights and of a matrix, as `core_rl_conformance.inputs.tiny_models.build` draws them."""
    config = model.config()
    vector = "1.0 + 0.2 * noise"
    if config.tie_word_embeddings:
        vector = f'({LOGIT_STD} if name.split(".")[-2] in ("norm", "ln_f") else 1.0) * ({vector})'
    if config.model_type.startswith(("gemma2", "gemma3")):
        vector += " - 1.0"
    if config.model_type.startswith("qwen3_5"):
        vector += ' - (0.0 if "linear_attn" in name else 1.0)'
    fan_in = "noise.shape[-1]"
    if config.model_type == "gpt2":
        fan_in = 'noise.shape[0 if ".c_" in name else -1]'
    return vector, f'({LOGIT_STD} if name.startswith("lm_head") else 1.0) * noise / {fan_in} ** 0.5'


def _expected(computation: Computation) -> Iterator[str]:
    """The dictionary ``expected``."""
    quantity, rows = computation.quantity, computation.data.rows
    if rows:
        yield f"ROWS = {[list(row.ids) for row in rows]}"
    if isinstance(quantity, Output):
        yield from _output(quantity)
    elif isinstance(quantity, HiddenStates):
        yield from _hidden_states(quantity.layer)
    elif isinstance(quantity, CheckLoss):
        yield from _data(computation)
        yield from _gradients(quantity, computation.model)
    else:
        yield "expected = {name: parameter.detach() for name, parameter in tiny.named_parameters()}"
        yield from _renamed("expected", computation.model)


def _renamed(tensors: str, model: TinyModel) -> Iterator[str]:
    """Give ``tensors`` of a given model the names of its files, which have experts one by one."""
    if model.source:
        yield f"{tensors} = revert_weight_conversion(tiny, {tensors})"


def _forward(head: str, temperature: float) -> Iterator[str]:
    if head == "lm":
        yield f"    logits = model(torch.tensor([ids]), use_cache=False).logits[0] / {temperature}"
        yield "    log_p = logits.log_softmax(-1)"
    else:
        yield "    hidden = model.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state"
        yield "    states = model.score(hidden)[0, :, 0]"


def _output(output: Output) -> Iterator[str]:
    """A value before each token, and 0 for the first; at the end of a sequence for ``bootstrap`` and ``scores``."""
    head = "lm" if output.name in ("logprobs", "entropy", "logits") else "value"
    values = {
        "logprobs": "log_p[range(len(ids) - 1), ids[1:]]",
        "entropy": "-(log_p.exp() * log_p).sum(-1)[:-1]",
        "logits": "logits[:-1]",
        "values": "states[:-1]",
    }
    value = "states[-1]"
    if output.name in values:
        first = "0 * logits[:1]" if output.name == "logits" else "torch.zeros(1)"
        value = f"torch.cat([{first}, {values[output.name]}])"
    yield "expected = {}"
    yield "for number, ids in enumerate(ROWS):"
    yield from _forward(head, output.temperature)
    yield f'    expected[f"sequence {{number}}"] = {value}.detach()'


def _hidden_states(layer: int) -> Iterator[str]:
    yield "lists = [part for part in model.get_decoder().modules() if isinstance(part, torch.nn.ModuleList)]"
    yield "layers = next(part for part in lists if len(part) == model.config.get_text_config().num_hidden_layers)"
    yield "states, expected = [], {}"
    if layer:
        yield "def keep(layer, inputs, output):"
        yield "    states.append(output if isinstance(output, torch.Tensor) else output[0])"
        yield f"layers[{layer - 1}].register_forward_hook(keep)"
    else:
        yield "layers[0].register_forward_pre_hook(lambda layer, inputs: states.append(inputs[0]))"
    yield "for number, ids in enumerate(ROWS):"
    yield "    model(torch.tensor([ids]), use_cache=False)"
    yield '    expected[f"sequence {number}"] = states[-1][0].detach()'


def _data(computation: Computation) -> Iterator[str]:
    trained = []
    for row in computation.data.rows:
        mask = row.for_oracle().fields["mask"].tolist()
        trained.append({t: a for t, a in enumerate(row.advantages) if mask[t]})
    yield f"TRAINED = {trained}  # advantages of trained tokens"
    if isinstance(computation.quantity, OF_SCALARS):
        yield f"TARGETS = {[row.target for row in computation.data.rows]}  # of the last state"


def _gradients(loss: CheckLoss, model: TinyModel) -> Iterator[str]:
    of_scalars = isinstance(loss, OF_SCALARS)
    head = "value" if of_scalars else "lm"
    yield "total, weight = 0.0, 0"
    yield f"for ids, row{', target' * of_scalars} in zip(ROWS, TRAINED{', TARGETS' * of_scalars}):"
    yield from _forward(head, loss.temperature)
    yield "    at, advantages = [t - 1 for t in row], torch.tensor(list(row.values()))"
    if head == "lm":
        yield "    logprobs, entropy = log_p[at, [ids[t] for t in row]], -(log_p.exp() * log_p).sum(-1)[at]"
    yield from _loss(loss)
    yield "(total / weight).backward()"
    yield "grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}"
    yield "norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()"
    yield from _renamed("grads", model)
    yield 'expected = {"loss": total.detach() / weight, "norm": norm, **grads}'


def _loss(loss: CheckLoss) -> Iterator[str]:
    """The sum over one sequence and its weight."""
    weight = "len(at)"
    if isinstance(loss, TokenMeanLoss):
        total = f"(-advantages * logprobs - {loss.entropy_coef} * entropy).sum()"
    elif isinstance(loss, SequenceMeanLoss):
        total, weight = "(-advantages * logprobs).sum() / max(1, len(at))", "bool(at)"
    elif isinstance(loss, OutputsLoss):
        if "logits" in loss.names:
            yield "    costs = (torch.arange(logits.shape[-1]) % 7 - 3) / 4"
        total = f"(advantages * ({' + '.join(TERMS[name] for name in loss.names)})).sum()"
    elif isinstance(loss, ValueLoss):
        total = "0.5 * (states[at] - advantages).square().sum() + 0.5 * (states[-1] - target) ** 2"
    else:
        total, weight = "0.5 * (states[-1] - target) ** 2", "1"
    yield f"    total, weight = total + {total}, weight + {weight}"

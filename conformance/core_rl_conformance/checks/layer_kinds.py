"""Models with layers of other kinds: computed right, or refused when the engine is built."""

from __future__ import annotations

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from core_rl.errors import LayoutError, UnsupportedCapability
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import BUDGET, EngineUnderTest, per_sequence
from core_rl_conformance.inputs.data import ragged
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import OTHER_LAYERS, TinyModel
from core_rl_conformance.procedures.outputs import verify_form


@check("I6.layer-kinds", each="layout")
def other_layers_are_right_or_refused(subject: EngineUnderTest) -> None:
    """A hybrid of Gated DeltaNet, latent attention and attention sinks: each is the oracle's, or refused.

    A refusal is an `UnsupportedCapability` or a `LayoutError` when the engine is initialized. Families that the
    installed transformers lacks are left out.

    Why: on packed sequences the state of a recurrence or a convolution crosses from one sequence to the next, and
    sinks that are left out change every log-prob; nothing fails (transformers #46093, verl #6660, slime #1686).
    Look at: the layers of the model that are not attention, with more than one sequence in a micro-batch, and whether
    the engine declares its models.
    """
    for family in (family for family in OTHER_LAYERS if family in CONFIG_MAPPING):
        model = TinyModel(family=family, seed=subject.case.seed).with_multiples(*subject.case.multiples)
        data = ragged(model.vocab_size, 1000 * subject.case.seed)
        try:
            group = subject.start(model)
        except (UnsupportedCapability, LayoutError):
            continue
        output = group.forward(data.batch(), BUDGET)
        verify_form(subject, output, "logprobs", data)
        got = per_sequence(output, "logprobs", data)
        subject.verify_tokens(f"log-probs of {family}", got, subject.outputs(model, data, "logprobs"))
        subject.verify_backward(f"of {family}", group, model, data, TokenMeanLoss(), BUDGET)

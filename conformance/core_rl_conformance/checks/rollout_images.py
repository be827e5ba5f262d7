"""Inference engines with vision-language models: images of requests, and of scored sequences."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from core_rl.config.capability import Capability
from core_rl.data.requests import LLMRequest
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import RolloutError
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.updates import published
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.data import Ragged
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.inputs.tiny_vision import TinyImages
from core_rl_conformance.procedures import serving
from core_rl_conformance.profile import VISION

LENGTHS = (19, 7, 23, 12, 31, 5, 17, 9)


def other_images(data: Ragged) -> Ragged:
    """The sequences with images, which are others of the same sizes."""
    return Ragged(
        tuple(
            replace(row, images=replace(row.images, seed=row.images.seed + 100))
            for row in data.rows
            if row.images is not None
        )
    )


def verify_images(
    subject: EngineUnderTest, engine: InferenceEngine, model: TinyModel, data: Ragged, label: str
) -> None:
    """Tokens drawn after ``data``, and its own where the engine scores, have the log-probs of ``model``."""
    __tracebackhide__ = True
    responses = serving.ask(engine, serving.requests_for(data))
    sampled = f"log-probs of tokens generated {label}"
    serving.verify_logprobs(subject, sampled, model, responses, prompts=data)
    if subject.spec.supports(Capability.SCORE):
        expected = subject.outputs(model, data, "logprobs")
        got = list(engine.score(data.batch()).split(data.lengths))
        subject.verify_tokens(f"scores {label}", got, expected, subject.places(data))


@check("I7.rollout-images", kind="inference", requires=[Capability.VISION], families=VISION, each="layout")
def rollouts_see_their_images(subject: EngineUnderTest) -> None:
    """Log-probs of tokens after images, and of given tokens, are the oracle's; equal ids with other images differ.

    Why: a server that processes the image again, counts its positions as text, or takes the keys of another image
    with the same placeholders from its prefix cache draws from another policy than the trainer computes.
    Look at: the tensors that reach the tower, positions in time, height and width, and the key of the prefix cache.
    """
    model, data = subject.model(), subject.data(LENGTHS)
    engine = subject.serve(model)
    verify_images(subject, engine, model, data, "after images")
    verify_images(subject, engine, model, other_images(data), "after other images in the same places")
    verify_images(subject, engine, model, data.select(range(len(LENGTHS))[::-1]), "after images seen before")


@check(
    "I12.receive-tower",
    kind="inference",
    requires=[Capability.VISION, Capability.SYNC_DISK],
    families=VISION,
    each="layout",
)
def updates_reach_the_tower(subject: EngineUnderTest) -> None:
    """Tokens after an image that was seen before an update have the log-probs of the new tower.

    Why: servers keep features of images, and an update empties the prefix cache alone.
    Look at: names of the tower that the loader skips, and caches of features.
    """
    model, data = subject.model(), subject.data(LENGTHS)
    engine = subject.serve(model, keep=False)
    verify_images(subject, engine, model, data, "before the update")
    new = replace(model, seed=model.seed + 1000)
    serving.installed(engine, published(subject, new, 1))
    verify_images(subject, engine, new, data, "after the update")


@check(
    "contract.rollout-placeholders",
    kind="inference",
    requires=[Capability.VISION],
    families=VISION,
    each="layout",
)
def requests_fit_their_images(subject: EngineUnderTest) -> None:
    """A prompt whose placeholders are not as many as the features of its images is a `RolloutError`.

    Why: a server dies of features without a place, or gives them to another request.
    Look at: the limits that `build` returns, which need the config of the vision-language model.
    """
    model, data = subject.model(), subject.data(LENGTHS)
    engine = subject.serve(model)
    row = next(row for row in data.rows if row.images is not None)
    assert isinstance(row.images, TinyImages)
    media = row.images.media()
    for label, ids, sent in (
        ("placeholders without an image", row.ids, {}),
        ("an image without placeholders", (5, 7, 9), media),
    ):
        request = LLMRequest(input_ids=ids, media=sent, sampling=serving.PLAIN)
        subject.require_error(
            RolloutError,
            partial(serving.ask, engine, [request]),
            f"{label}: agenerate() raises no RolloutError",
        )
    verify_images(subject, engine, model, data, "after refused requests")

"""Vision-language models in train and inference engines: images, their placeholders, and towers that are frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl.data.media import Media
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.requests import LLMRequest
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import BatchError, RolloutError
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.updates import published
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.inputs.data import Ragged, ragged
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.inputs.tiny_vision import TinyImages
from core_rl_conformance.procedures import serving
from core_rl_conformance.procedures.adapters import verify_trained
from core_rl_conformance.profile import VISION

TOKEN_MEAN = TokenMeanLoss(temperature=0.8)
LENGTHS = (19, 7, 23, 12, 31, 5, 17, 9)
TOWERS = ("visual.", "vision_tower.")
"""Parts of the names of parameters of towers, and of the mergers inside of some."""
MERGERS = ("merger", "multi_modal_projector")
"""Parts of the names of parameters that map features to hidden states of the text."""


@check("I6.images", families=VISION, each="layout")
def neighbours_change_no_image(subject: EngineUnderTest) -> None:
    """Log-probs of sequences with images are the oracle's in any order, next to text alone, and at any cut.

    Why: positions of images that are counted over the pack, features that go to the placeholders of another sequence,
    and attention of a tower that follows the text's sequences give log-probs of other images, without an error
    (axolotl #3817, transformers #44158, Megatron-Bridge #1776).
    Look at: rows of positions for time, height and width, which each sequence counts for itself, next to the row of
    the text's positions, which separates sequences; the order of images; the attention of the tower.
    """
    model, data = subject.model(), subject.data(LENGTHS)
    group = subject.start(model)
    backwards = data.select(range(len(LENGTHS))[::-1])
    images = {number: row.images for number, row in enumerate(data.rows) if row.images is not None}
    pictured = list(images)
    alternating = data.select([number for place in pictured for number in (place, 1)])
    text = Ragged(tuple(row for row in data.rows if row.images is None))
    # Of one size in patches, with other pixels.
    alike = [number for number, several in images.items() if several.sizes == images[pictured[0]].sizes]
    for label, rows, cut in (
        ("of images in one pack", data, ONE_PASS),
        ("of images in the opposite order", backwards, ONE_PASS),
        ("of images next to copies of a text", alternating, ONE_PASS),
        ("of images alone", data.select(pictured), ONE_PASS),
        ("of images of one size", data.select(alike * subject.layout.dp), ONE_PASS),
        ("of text alone", text, ONE_PASS),
        ("of one sequence at a time", data, MicroBatchSpec(count=len(LENGTHS))),
    ):
        subject.verify_logprobs(label, group, model, rows, cut)


@check("I1.images", families=VISION, each="layout")
def text_gives_towers_no_gradient(subject: EngineUnderTest) -> None:
    """Gradients of batches with few or no images are the oracle's; text alone gives a tower gradients of exactly 0.

    Why: a rank without an image that skips its tower leaves the others in a collective (transformers #37186), and a
    blank image in its place must not be trained on.
    Look at: the pass that ranks without images make through the tower, whose features belong to no token.
    """
    model, data = subject.model(), subject.data(LENGTHS)
    group = subject.start(model)
    each = MicroBatchSpec(count=len(LENGTHS))
    subject.verify_backward("with one sequence at a time", group, model, data, TOKEN_MEAN, each)
    few = data.select([1, 3, 4, 5, 7])
    subject.verify_backward("of one sequence with images", group, model, few, TOKEN_MEAN)
    text = ragged(model.vocab_size, subject.case.seed, LENGTHS)
    group.forward_backward(text.batch(), TOKEN_MEAN.spec(), ONE_PASS)
    tower = {name: grad for name, grad in group.named_tensors("grads").items() if _has_any(TOWERS, name)}
    subject.require(bool(tower), "named_tensors('grads') has no gradient of the tower")
    nonzero = sorted(name for name, grad in tower.items() if bool(grad.any()))
    subject.require(not nonzero, f"a batch without images gives {nonzero[:5]} gradients that are not 0")


def _has_any(parts: Sequence[str], name: str) -> bool:
    return any(part in name for part in parts)


@check("I20.frozen-tower", requires={Capability.FROZEN_PARAMETERS}, families=VISION, each="layout")
def frozen_towers_stay(subject: EngineUnderTest) -> None:
    """With a frozen tower, its parameters stay bit for bit, and the merger behind it has the oracle's gradients.

    Why: recipes freeze the tower and train the merger. A tower without gradients ends the graph before the merger in
    some engines, and in others weight decay moves it.
    Look at: the patterns of ``model.frozen``, and the pass through a tower without gradients.
    """
    model, data = subject.model(), subject.data(LENGTHS)
    parameters = subject.expected.oracle(model).parameters()
    frozen = [name for name in parameters if _has_any(TOWERS, name) and not _has_any(MERGERS, name)]
    group = subject.start(model, frozen=frozen, optimizer={"weight_decay": 0.1})
    before = group.named_tensors("master")
    expected = subject.gradients(model, data, TOKEN_MEAN)
    group.forward_backward(data.batch(), TOKEN_MEAN.spec(), ONE_PASS)
    grads = group.named_tensors("grads")
    subject.require(
        not set(frozen) & grads.keys(),
        f"frozen parameters have gradients: {sorted(set(frozen) & grads.keys())[:5]}",
    )
    verify_trained(subject, "behind a frozen tower", grads, expected, lambda name: name not in frozen)
    group.optimizer_step()
    after = group.named_tensors("master")
    subject.verify_same(
        "the frozen tower", {name: after[name] for name in frozen}, {name: before[name] for name in frozen}
    )
    moved = [name for name in parameters if _has_any(MERGERS, name)]
    still = [name for name in moved if torch.equal(after[name], before[name])]
    subject.require(bool(moved) and not still, f"the merger is trained, and {still[:5]} did not move")


@check("contract.placeholders", families=VISION, each="layout")
def placeholders_fit_their_images(subject: EngineUnderTest) -> None:
    """Placeholders that are not as many as the features of their images are a `BatchError`, and so are NaN pixels.

    Why: features that are one too many move all that follow to the wrong tokens; some versions of transformers drop
    the rest without a word.
    Look at: the core checks each sequence before a pass; `check_batch` needs the whole config from ``hf_config()``.
    """
    model, data = subject.model(), subject.data(LENGTHS)
    group = subject.start(model)
    batch = data.batch()
    place = next(number for number, row in enumerate(data.rows) if row.images is not None)

    def forward_with(media: Media) -> object:
        every = [media if number == place else other for number, other in enumerate(batch.media)]
        rows = [torch.tensor(row.ids) for row in data.rows]
        return group.forward(SequenceBatch.from_sequences(rows, media=every), ONE_PASS)

    pixels = batch.media[place]["pixel_values"]
    cases: dict[str, Media] = {
        "an image without pixels": {},
        "more pixels than placeholders": {
            name: torch.cat([value, value]) for name, value in batch.media[place].items()
        },
        "pixels that are NaN": {**batch.media[place], "pixel_values": torch.full_like(pixels, float("nan"))},
    }
    for label, media in cases.items():
        problem = f"{label}: forward() raises no BatchError"
        subject.require_error(BatchError, partial(forward_with, media), problem)
    subject.verify_logprobs("after refused batches", group, model, data)


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
    responses = serving.ask(engine, serving.requests_for(data))
    sampled = f"log-probs of tokens generated {label}"
    serving.verify_logprobs(subject, sampled, model, responses, prompts=data)
    serving.verify_scores(subject, label, engine, data, model)


@check("I7.rollout-images", kind="inference", families=VISION, each="layout")
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


@check("I12.receive-tower", kind="inference", requires={Capability.SYNC_DISK}, families=VISION, each="layout")
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


@check("contract.rollout-placeholders", kind="inference", families=VISION, each="layout")
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

"""One engine with every fault of dropout, sizes and bfloat16 that leaves room for the others."""

from __future__ import annotations

from mutants import bfloat16, dropout, sizes


class EveryFault(
    dropout.StaysOnAfterAStep,
    dropout.OneSeedForAllRanks,
    dropout.AdapterAtAnotherRate,
    sizes.ClampedPositions,
    sizes.IdsInSixteenBits,
    sizes.ThetaByDefault,
    sizes.UnscaledRotary,
    sizes.EpsilonByDefault,
    sizes.TrainsTwoLayers,
    sizes.ShortPass,
    sizes.FewSequences,
    sizes.TemperatureClamped,
    sizes.ZeroRateIsUnset,
    sizes.GradientsInFloat16,
    bfloat16.AddsUpInHalf,
    bfloat16.ReducesInHalf,
    bfloat16.LoadsMastersOfHalf,
    bfloat16.NormsInHalf,
    bfloat16.TemperatureInHalf,
    bfloat16.ValuesInHalf,
    bfloat16.LogprobsInHalf,
    bfloat16.RotaryInHalf,
):
    """Each of them is a mutant of its own, which one check is meant for.

    `dropout.RecomputesOtherMasks` is not here: recomputation would find float32 weights in place of their copies.
    """

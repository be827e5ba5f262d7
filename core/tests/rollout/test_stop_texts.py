"""Stop texts that end a completion of the reference rollout."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from core_rl.reference.sampling import StopAtText


@pytest.mark.parametrize("tidies", [True, False])
@pytest.mark.parametrize(("stop", "ends"), [(" .", True), ("a .", True), ("a.", False), (". ", False)])
def test_stop_texts_match_written_spaces(stop: str, ends: bool, tidies: bool) -> None:
    inner = Tokenizer(WordLevel({"<unk>": 0, "a": 1, " .": 2}, unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=tidies)
    assert StopAtText([stop], tokenizer, 0).found_in([1, 2]) is ends

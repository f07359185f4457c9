"""lm-eval's own model, with a text's ids as its tokenizer adds to them in prompts, and sums in float32.

lm-eval 0.4.13 takes what the tokenizer adds for a part of the text. Where it adds a token before, rolling scores that
token. Where it appends one (EOS), an answer loses its first token and ends with that one instead. In a batch the first
prompt alone decides whether the prompts begin with BOS. In half precision the log-probabilities of an answer are added
in half precision, so a sum has eight bits in bfloat16.
"""

from functools import cache, cached_property, partial

import torch
from torch.nn.utils.rnn import pad_sequence

from hope_hf.common.process import warn_once
from hope_hf.data import tokens_before

from .subject import Subject

# Of the dtypes in which models are evaluated; sums of others need no wider one.
HALVES = (torch.bfloat16, torch.float16)


@cache
def _harness_class() -> type:
    # Slow to import.
    from lm_eval.models.huggingface import HFLM

    class HarnessModel(HFLM):
        """HFLM whose texts begin with what the tokenizer puts before prompts, and have nothing added behind."""

        _begins = True

        @cached_property
        def _before(self) -> list[int]:
            return tokens_before(self.tokenizer)

        def tok_encode(self, string, add_special_tokens=None, left_truncate_len=None, **kwargs) -> list[int]:
            ids = self.tokenizer.encode(string, add_special_tokens=False, split_special_tokens=True)
            if self._begins and add_special_tokens is not False:
                ids = self._before + ids
            return ids[-left_truncate_len:] if left_truncate_len else ids

        def tok_batch_encode(self, strings, padding_side="left", left_truncate_len=None, truncation=False):
            rows = []
            for string in strings:
                row = torch.tensor(self.tok_encode(string))
                if left_truncate_len and len(row) > left_truncate_len:
                    row = row[-left_truncate_len:]
                    warn_once(f"zero_shot: prompts are cut to their last {left_truncate_len:,} tokens (--max_length).")
                rows.append(row)
            padded = partial(pad_sequence, batch_first=True, padding_side=padding_side)
            ids = padded(rows, padding_value=self.tokenizer.pad_token_id)
            mask = padded(list(map(torch.ones_like, rows)))
            return ids, mask

        def loglikelihood_rolling(self, requests, disable_tqdm=False) -> list[float]:
            # lm-eval puts its prefix, BOS or EOS, before the text itself.
            self._begins = False
            try:
                return super().loglikelihood_rolling(requests, disable_tqdm)
            finally:
                self._begins = True

    return HarnessModel


def harness_model(subject: Subject, **options):
    """The model of `subject` for `lm_eval.simple_evaluate`; `options` are those of lm-eval's HFLM."""
    sums = {"softmax_dtype": "float32"} if subject.model.dtype in HALVES else {}
    return _harness_class()(pretrained=subject.model, backend="causal", **sums, **options)

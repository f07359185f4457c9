"""What `torch.compile` leaves out of its graphs."""

from collections.abc import Callable
from functools import wraps

import torch
from torch.fx.experimental.symbolic_shapes import has_static_value

from .cache_hope import past_of
from .continuum import keeps_state
from .documents import boundaries_of


def outside_where_cut_anew(forward: Callable) -> Callable:
    """`HopeModel.forward`, which a compiler leaves out of its graphs where it would trace other chunks every time.

    So it is in a model with a state that is given documents, that goes on with more than a token, or whose length
    varies: the tracer takes a second length for any length, of which chunks cannot be counted.
    """
    reason = "documents, earlier calls and other lengths cut every batch into other chunks"
    uncompiled = torch.compiler.disable(forward, reason=reason)

    @wraps(forward)
    def call(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        called = forward
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and keeps_state(self.config):
            text = kwargs.get("inputs_embeds") if input_ids is None else input_ids
            # `check_inputs` refuses a call without a text
            length = 0 if text is None else text.shape[1]
            has_documents = position_ids is not None or bool(boundaries_of(kwargs))
            goes_on = has_documents or past_of(past_key_values) is not None
            if not has_static_value(length) or length > 1 and goes_on:
                called = uncompiled
        return called(self, input_ids, attention_mask, position_ids, past_key_values, **kwargs)

    return call

"""Sample continuations for people to read."""

import torch

from hope_hf.common.files import read_small
from hope_hf.common.process import one_line

from .flags import Arguments
from .held_out import held_out_documents
from .result import SuiteResult
from .subject import PLAIN, Subject, require_finite

NUM_PROMPTS = 3
PROMPT_TOKENS = 32
NEW_TOKENS = 64
_SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "min_p": 0.0}
# Most bytes of a file of prompts.
LARGEST = 1 << 20


def sample(args: Arguments, subject: Subject) -> SuiteResult:
    """Greedy and sampled (temperature 0.8, top 50) continuations of `--prompts`, or of held-out documents' beginnings.

    Equal seeds give equal samples.
    """
    prompts = _prompts(args, subject)[: args.limit]
    new_tokens = args.max_new_tokens or NEW_TOKENS
    # The start token is counted, too.
    longest = 1 + max(map(len, prompts))
    bound = subject.longest_input
    if bound is not None and longest + new_tokens > bound:
        raise ValueError(
            f"--max_new_tokens {new_tokens} after prompts of up to {longest} tokens goes beyond the model's "
            f"{bound:,} positions (max_position_embeddings): lower it or shorten the --prompts."
        )
    rows = []
    shown = ["Continuations come after '>>>'."]
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([[subject.start, *prompt]], device=subject.model.device)
        with torch.no_grad():
            logits = subject.model(ids, use_cache=False).logits
        require_finite(logits[:, -1], "sample: the model's logits")
        row = {"prompt": subject.tokenizer.decode(prompt)}
        for way, options in {"greedy": {}, "sampled": _SAMPLED}.items():
            torch.manual_seed(args.seed + index)
            tokens = subject.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=bool(options),
                pad_token_id=subject.padding,
                **PLAIN,
                **options,
            )
            new_ids = tokens[0, ids.shape[1] :]
            row[way] = subject.tokenizer.decode(new_ids, skip_special_tokens=True)
            shown.append(f"--- {index + 1}, {way}")
            shown.append(f"{row['prompt']}>>>{row[way]}")
        rows.append(row)
    return SuiteResult(samples={"samples": rows}, text="\n".join(shown))


def _prompts(args: Arguments, subject: Subject) -> list[list[int]]:
    if args.prompts is None:
        texts = held_out_documents(args).encoded(subject.encode)
        return [ids[:PROMPT_TOKENS] for ids in texts[:NUM_PROMPTS]]
    try:
        # Not splitlines, which also cuts at characters that a prompt may have, such as U+2028.
        lines = read_small(args.prompts, LARGEST).replace("\r\n", "\n").split("\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ValueError(f"--prompts {args.prompts} cannot be read: {reason}.") from None
    prompts = [subject.encode(line) for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts {args.prompts} is empty: write one prompt per line.")
    return prompts

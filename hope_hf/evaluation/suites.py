"""The table of suites: name -> function of (arguments, subject). Later ones are added here."""

from .continual.class_suite import class_incremental
from .continual.suite import continual
from .memory import memory
from .needle.suite import needle
from .passkey import passkey
from .perplexity import perplexity
from .sample import sample
from .synthetic.suite import synthetic
from .zero_shot import zero_shot

SUITES = {
    "perplexity": perplexity,
    "passkey": passkey,
    "needle": needle,
    "memory": memory,
    "synthetic": synthetic,
    "zero_shot": zero_shot,
    "continual": continual,
    "class_incremental": class_incremental,
    "sample": sample,
}
# These train models of their own, or load several: the subject is None for them.
WITHOUT_SUBJECT = frozenset({"synthetic", "continual"})
# These read all checkpoints at once.
OVER_CHECKPOINTS = frozenset({"continual"})
# These read self-modifying memories.
NEEDS_MEMORY = frozenset({"memory"})
# These divide their work among the processes of a launcher.
IN_PROCESSES = frozenset({"zero_shot"})

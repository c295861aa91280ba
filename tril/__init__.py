"""See the attention of any decoder, and prove that it sees no future."""

from tril.decoder import assert_causal, check_causality
from tril.errors import UserError
from tril.experiments import ablate, head_scores, influence, repeat_probe
from tril.inspection import Inspection, inspect_heads
from tril.look import Captured, capture, look
from tril.weights import NotTheKernels

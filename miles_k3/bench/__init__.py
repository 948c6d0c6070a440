"""`miles-k3 bench`: what parts of the product cost on this machine, beside what the machine could give."""

from typing import Literal

EngineBench = Literal["decode", "eager", "prefill", "swap", "variants"]

"""`miles-k3 bench`: what parts of the product cost on this machine, beside what the machine could give."""

"""One file per formula of the model, each with a plain twin."""

"""`python -m miles_k3` is `miles-k3`."""

from miles_k3.cli import main

if __name__ == "__main__":
    main()
